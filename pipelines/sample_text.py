"""A generated text, round by round: which of its tokens were accepted drafts, which the target's own, and what was rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipelines.plain_data import ReportError

if TYPE_CHECKING:
    from decoding.settings import Round

Origin = Literal["accepted", "bonus", "correction", "target"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class SampleRound:
    """One verification round of a sample text: what was drafted, how much of it stood, and the texts of the tokens committed.

    `rejected` are the texts of the drafted tokens that did not stand: the first was refused, those after it fell with it.
    """

    drafted: int
    accepted: int
    tokens: tuple[str, ...]
    confidence: tuple[float, ...] = ()
    rejected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise ReportError(f"a round cannot accept {self.accepted} of {self.drafted} drafted tokens")
        if len(self.tokens) > self.accepted + 1:
            raise ReportError(f"a round that accepted {self.accepted} commits at most {self.accepted + 1} tokens, not {len(self.tokens)}")
        if self.confidence and len(self.confidence) != self.drafted:
            raise ReportError(f"{len(self.confidence)} confidences for {self.drafted} drafted tokens")
        if len(self.rejected) > self.drafted - self.accepted:
            raise ReportError(f"{len(self.rejected)} tokens cannot be rejected where {self.accepted} of {self.drafted} were accepted")

    def origins(self) -> tuple[Origin, ...]:
        """Where each committed token comes from; the last one is the target's own unless the text ended before it."""
        own: Origin = "target" if not self.drafted else "bonus" if self.accepted == self.drafted else "correction"
        return tuple("accepted" if slot < self.accepted else own for slot in range(len(self.tokens)))


@dataclass(frozen=True)
class SampleText:
    """One generated answer: the token that the target's prefill gave, which belongs to no round, then round by round."""

    domain: str
    prompt: str
    first: str
    rounds: tuple[SampleRound, ...]

    @property
    def tau(self) -> float | None:
        """Tokens committed per verification round of this text; None where it ended before the first round."""
        return sum(len(round_.tokens) for round_ in self.rounds) / len(self.rounds) if self.rounds else None

    def origins(self) -> set[Origin]:
        """The origins that occur in the text."""
        return {"target", *(origin for round_ in self.rounds for origin in round_.origins())}

    @classmethod
    def from_rounds(
        cls, domain: str, prompt: str, pieces: Sequence[str], rounds: Iterable[Round], word: Callable[[int], str] | None = None
    ) -> SampleText:
        """Cut an answer's token texts (see `token_pieces`) into the rounds that decoding recorded for it.

        `word` gives the text of a single token, for those that were rejected; None leaves them out.

        Raises ReportError where the rounds do not commit all tokens but the first.
        """
        cut, at = [], 1
        for round_ in rounds:
            refused = () if round_.stopped_in_draft else round_.draft[round_.accepted :]
            rejected = tuple(word(token) for token in refused) if word else ()
            tokens = tuple(pieces[at : at + round_.committed])
            cut.append(SampleRound(round_.drafted, round_.accepted, tokens, tuple(round_.confidence), rejected))
            at += round_.committed
        if at != len(pieces):
            raise ReportError(f"one first token and the rounds make {at} tokens, the text has {len(pieces)}")
        return cls(domain, prompt, pieces[0], tuple(cut))


def token_pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """The text each token adds, so that joining them gives the whole text.

    A byte-level token may hold a part of a character only: its piece is empty, and the character goes to the token that completes it.

    Args:
        decode: the tokenizer's decode, special tokens kept where they shall be seen.
        ids: the tokens of one answer.
    """
    pieces: list[str] = []
    start = shown = 0  # decode from `start` on: enough context for the tokenizer's spacing rules, without decoding the whole text per token
    for end in range(1, len(ids) + 1):
        before = decode(list(ids[start:shown]))
        text = decode(list(ids[start:end]))
        if text.endswith(REPLACEMENT) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, shown = shown, end
    return pieces
