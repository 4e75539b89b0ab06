"""Prompt sources: files of conversations and the prompts that ship with the project.

Every row that is read is kept or dropped under a reason, and the report says how many of each. Nothing here depends on the order of
rows: which of two duplicates stays, what is held out and what a share or a limit keeps are all decided by content hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from corpus.conversation import Conversation
from corpus.errors import CorpusError, RowRejected
from corpus.rows import LAYOUTS, parse_row

BUNDLED = ("bundled:train", "bundled:heldout")
DUPLICATE = "duplicate"
TOO_LONG = "too_long"


@dataclass(frozen=True)
class SourceSpec:
    """One source of a corpus.

    Attributes:
        name: "bundled:train", "bundled:heldout", or the path of a .jsonl or .json file.
        label: what rows are marked with unless they say so themselves; by default derived from the name.
        domain: the same for the domain.
        share: part of the source's rows to keep, in (0, 1].
        limit: how many rows to keep at most.
        max_chars: rows with more characters, all messages together, are dropped as `too_long`.
    """

    name: str
    label: str = ""
    domain: str = "chat"
    share: float = 1.0
    limit: int | None = None
    max_chars: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise CorpusError(f"source {self.name}: share={self.share} is outside (0, 1]. Give the part of its rows to keep, such as 0.25.")
        for what, value in (("limit", self.limit), ("max_chars", self.max_chars)):
            if value is not None and value < 1:
                raise CorpusError(f"source {self.name}: {what}={value} keeps nothing. Give a positive number, or null for no bound.")


@dataclass
class SourceReport:
    """What happened to every row of one source. `read` = `kept` + all of `dropped` + `not_drawn`."""

    source: str
    read: int = 0
    kept: int = 0
    not_drawn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        """Count one dropped row; the first example of each reason is kept for people to look at."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, example)

    def to_json(self) -> dict[str, Any]:
        """Plain data, reasons sorted by name."""
        return {
            "source": self.source,
            "read": self.read,
            "kept": self.kept,
            "not_drawn": self.not_drawn,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
            "examples": dict(sorted(self.examples.items())),
        }


def load_sources(specs: Sequence[SourceSpec]) -> tuple[list[Conversation], list[SourceReport]]:
    """Read several sources and remove duplicates within and across them.

    A row that stands in several sources is counted as kept in the one listed first.

    Returns:
        conversations in the order of the sources and of the rows that stay, and one report for each source.

    Raises:
        CorpusError: no source given, or a source that is missing, empty, unreadable or without a usable row.
    """
    if not specs:
        raise CorpusError(f"no prompt source is configured. Name at least one: {', '.join(BUNDLED)}, or a .jsonl file.")
    taken: set[str] = set()
    conversations: list[Conversation] = []
    reports: list[SourceReport] = []
    for spec in specs:
        rows, report = read_source(spec)
        fresh = [row for row in rows if row.near_key not in taken]
        if len(fresh) < len(rows):
            report.dropped[DUPLICATE] += len(rows) - len(fresh)
            report.examples.setdefault(DUPLICATE, "a row that an earlier source holds too")
        drawn = draw(fresh, spec.share, spec.limit)
        report.not_drawn = len(fresh) - len(drawn)
        report.kept = len(drawn)
        taken.update(row.near_key for row in drawn)
        conversations.extend(drawn)
        reports.append(report)
    return conversations, reports


def read_source(spec: SourceSpec) -> tuple[list[Conversation], SourceReport]:
    """Read one source whole: its usable rows without duplicates, before any share or limit, with the report so far."""
    label, rows = _open(spec)
    report = SourceReport(label)
    conversations: list[Conversation] = []
    places: list[str] = []
    first_rejected = ""
    for place, row in rows:
        report.read += 1
        try:
            if isinstance(row, RowRejected):
                raise row
            conversation = parse_row(row, label, spec.domain, report.repaired)
            _check_length(conversation, spec.max_chars)
        except RowRejected as rejected:
            report.drop(rejected.reason, f"{place}: {rejected.detail}")
            first_rejected = first_rejected or f"{place}: {rejected}"
            continue
        conversations.append(conversation)
        places.append(place)
    if not report.read:
        raise CorpusError(f"{spec.name} holds no rows. Fill it with one JSON object a line, each with one of {', '.join(LAYOUTS)}.")
    if not conversations:
        raise CorpusError(
            f"none of the {report.read} rows of {spec.name} can be used. The first one, {first_rejected}. "
            f"A row is a JSON object with one of {', '.join(LAYOUTS)}; mend the file or name another one."
        )
    kept = unique(conversations)
    surviving = set(map(id, kept))
    for conversation, place in zip(conversations, places, strict=True):
        if id(conversation) not in surviving:
            report.drop(DUPLICATE, f"{place}: equal to another row of this source, whitespace aside")
    report.kept = len(kept)
    return kept, report


def unique(conversations: Sequence[Conversation]) -> list[Conversation]:
    """One conversation of each set of duplicates, in the given order of places.

    Of rows that differ in whitespace only the one with the smallest id stays, whatever the order they come in.
    """
    best: dict[str, Conversation] = {}
    for conversation in conversations:
        held = best.get(conversation.near_key)
        if held is None or conversation.id < held.id:
            best[conversation.near_key] = conversation
    chosen = set(map(id, best.values()))
    return [c for c in conversations if id(c) in chosen]


def draw(conversations: Sequence[Conversation], share: float, limit: int | None) -> list[Conversation]:
    """A reproducible sample by content hash: a larger share or limit keeps everything that a smaller one kept."""
    kept = [c for c in conversations if _fraction("draw", c.near_key) < share]
    if limit is None or len(kept) <= limit:
        return kept
    chosen = {c.id for c in sorted(kept, key=lambda c: (_fraction("draw", c.near_key), c.id))[:limit]}
    return [c for c in kept if c.id in chosen]


def split_heldout(
    conversations: Iterable[Conversation], share: float, salt: str = "heldout"
) -> tuple[list[Conversation], list[Conversation]]:
    """Part conversations into training and held-out rows by the hash of their first question.

    A question's side depends on nothing but its text, so it never moves when rows are added or reordered, and two conversations
    that start with the same question are never on different sides.

    Args:
        share: expected part of the questions that is held out, in [0, 1).
        salt: another salt gives another split.

    Returns:
        (training, held-out)
    """
    if not 0 <= share < 1:
        raise CorpusError(f"the held-out share is {share}, outside [0, 1). Give the part of the questions to hold out, such as 0.02.")
    train: list[Conversation] = []
    heldout: list[Conversation] = []
    for conversation in conversations:
        (heldout if _fraction(salt, conversation.split_key) < share else train).append(conversation)
    return train, heldout


def _fraction(salt: str, key: str) -> float:
    """A number in [0, 1) that the text alone decides."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{key}".encode()).digest()[:6], "big") / 2**48


def _check_length(conversation: Conversation, max_chars: int | None) -> None:
    length = sum(len(m.content) + len(m.reasoning) for m in conversation.messages)
    if max_chars is not None and length > max_chars:
        raise RowRejected(TOO_LONG, f"{length} characters, the limit is {max_chars}")


def _open(spec: SourceSpec) -> tuple[str, Iterator[tuple[str, Any]]]:
    """The label of a source and its raw rows with their places."""
    if spec.name.startswith("bundled"):
        if spec.name not in BUNDLED:
            raise CorpusError(f"unknown bundled prompts {spec.name!r}. There are {' and '.join(BUNDLED)}.")
        part = spec.name.removeprefix("bundled:")
        data = resources.files("corpus").joinpath("prompts", f"{part}.jsonl").read_bytes()
        return spec.label or "bundled", _rows(data.splitlines())
    path = Path(spec.name).expanduser()
    return spec.label or path.stem, _file_rows(path)


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        raise CorpusError(f"{path} is a folder, not a prompt file. Name a .jsonl or .json file in it.")
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".json":
                yield from _array_rows(path, file.read())
            else:
                yield from _rows(file)
    except FileNotFoundError as error:
        raise CorpusError(
            f"no prompt file {path}. Check the path, or use {BUNDLED[0]} for the prompts that ship with the project."
        ) from error
    except OSError as error:
        raise CorpusError(f"cannot read the prompt file {path}: {error.strerror or error}. Check its permissions.") from error


def _rows(lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """JSON lines. Blank ones are no rows; one that cannot be decoded yields its rejection in place of a value."""
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark, as Windows editors write
        if line.strip():
            yield f"line {number}", _decode(line)


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowRejected("invalid_utf8", f"byte {error.start} is not UTF-8")
    except (ValueError, RecursionError) as error:
        return RowRejected("invalid_json", f"not JSON ({error})")


def _array_rows(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """A .json file: one array of rows, as ShareGPT dumps come."""
    if not data.strip():
        return
    value = _decode(data.removeprefix(b"\xef\xbb\xbf"))
    if isinstance(value, RowRejected):
        raise CorpusError(f"{path} is not a JSON document: {value.detail}. A file with one object a line should end in .jsonl.")
    if not isinstance(value, list):
        raise CorpusError(f"{path} holds no array of rows. Write the rows as one JSON array, or one object a line in a .jsonl file.")
    for number, row in enumerate(value, 1):
        yield f"row {number}", row
