"""Which rows make up a corpus: duplicates, mixtures, the held-out split.

Everything is decided by content hashes, so nothing depends on the order of rows or of sources, and adding rows moves no other one
from one part to the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from corpus.conversation import Conversation
from corpus.errors import CorpusError, RowRejected
from corpus.sources import Source


def drop_duplicates(sources: Sequence[Source]) -> None:
    """Keep one row of those that are equal but for whitespace, within and across sources.

    A row that stands in several sources counts for the one whose name comes first in the alphabet; within a source the one with the
    smallest id stays.
    """
    taken: set[str] = set()
    for source in sorted(sources, key=lambda s: (s.spec.name, s.spec.subset or "", s.spec.split)):
        best: dict[str, Conversation] = {}
        for row in source.rows:
            held = best.get(row.near_key)
            if held is None or _rank(row) < _rank(held):
                best[row.near_key] = row
        chosen = set(map(id, best.values()))

        def judge(row: Conversation, chosen: set[int] = chosen) -> None:
            if id(row) not in chosen:
                raise RowRejected("duplicate", "equal to another row of this source, whitespace aside")
            if row.near_key in taken:
                raise RowRejected("duplicate", "another source holds it too")

        source.sift(judge)
        taken.update(best)


def mix(sources: Sequence[Source]) -> None:
    """Thin the sources out to their weights.

    Of N rows a source of weight w gets floor(N w / W), W the sum of the weights, and N is the largest number at which no source runs
    out: no row occurs twice. Which rows a source gives is decided by the smallest hashes of their content. Without weights all stay.

    Raises:
        CorpusError: some sources have a weight and others have none, or a source has no row left.
    """
    weights = [source.spec.weight for source in sources if source.spec.weight is not None]
    if not weights:
        return
    if len(weights) < len(sources):
        bare = next(source.spec.name for source in sources if source.spec.weight is None)
        raise CorpusError(f"some sources have a weight, {bare} has none. Give every source a weight, or none of them.")
    whole = math.fsum(weights)  # exact, whatever the order
    spent = [source.spec.name for source in sources if not source.kept]
    if spent:
        raise CorpusError(f"source {spent[0]} has no row left to mix. Leave it out, or add prompts to it.")
    rows = min(source.kept * whole / weight for source, weight in zip(sources, weights, strict=True))
    for source, weight in zip(sources, weights, strict=True):
        count = min(source.kept, math.floor(rows * weight / whole + 1e-9))
        chosen = {row.id for row in sorted(source.rows, key=lambda row: (_fraction("draw", row.near_key), row.id))[:count]}
        source.not_drawn += source.kept - count
        source.rows = [row for row in source.rows if row.id in chosen]


def split_heldout(conversations: Sequence[Conversation], share: float) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations, told apart by a hash of the first question.

    Conversations that begin with the same question land on the same side, and a conversation keeps its side however many others are
    added or removed.

    Args:
        share: expected part of the held-out side, in [0, 1).
    """
    if not 0 <= share < 1:
        raise CorpusError(f"held-out share {share} is outside [0, 1). Give the part to hold out, such as 0.05.")
    train: list[Conversation] = []
    heldout: list[Conversation] = []
    for conversation in conversations:
        side = heldout if _fraction("heldout", conversation.split_key) < share else train
        side.append(conversation)
    return train, heldout


def _rank(row: Conversation) -> tuple[str, str, str]:
    return row.id, row.source, row.domain


def _fraction(salt: str, key: str) -> float:
    """A number in [0, 1) that the text alone decides."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{key}".encode()).digest()[:6], "big") / 2**48
