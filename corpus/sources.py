"""Prompt sources: files of conversations, data sets of the Hugging Face hub, and the prompts that ship with the project.

Every row that is read is kept or dropped under a reason, and its source counts how many of each. Nothing here depends on the order of
rows; `corpus.selection` says how duplicates, mixing and the held-out split keep it so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.conversation import Conversation
from corpus.errors import CorpusError, RowRejected
from corpus.hub import HubSet, hub_rows
from corpus.rows import LAYOUTS, parse_row

BUNDLED = ("bundled:train", "bundled:heldout")
HUB = "hf:"
_WATCHED = 256  # rows between two reports of progress


@dataclass(frozen=True)
class SourceSpec:
    """One source of a corpus.

    Attributes:
        name: "bundled:train", "bundled:heldout", the path of a .jsonl or .json file, or "hf:" with a hub data set or a local folder in
            the same layout ("hf:mlabonne/open-perfectblend").
        label: what rows are marked with unless they say so themselves; by default derived from the name.
        domain: the same for the domain.
        weight: this source's share of the mixture, see `corpus.selection.mix`; None keeps all its rows.
        first: read this many rows at most, the first ones. The one setting that lets a source's order matter: it spares streaming a
            large data set to its end.
        subset, split: of a hub data set.
    """

    name: str
    label: str = ""
    domain: str = "chat"
    weight: float | None = None
    first: int | None = None
    subset: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise CorpusError(f"source {self.name}: weight={self.weight} is no share of a mixture. Give a positive number.")
        if self.first is not None and self.first < 1:
            raise CorpusError(f"source {self.name}: first={self.first} reads nothing. Give a positive number, or null for all rows.")
        if not self.name.startswith(HUB) and (self.subset is not None or self.split != "train"):
            raise CorpusError(f"source {self.name}: only hub data sets (hf:ORG/NAME) have a subset or split.")


@dataclass
class Source:
    """A source as it was read: the rows that stay, and what happened to every other one.

    `read` = `kept` + all of `dropped` + `not_drawn`, at any time. `examples` holds the first row of each reason, for people to look at.
    """

    spec: SourceSpec
    label: str
    rows: list[Conversation] = field(default_factory=list)
    read: int = 0
    not_drawn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        return len(self.rows)

    def drop(self, rejected: RowRejected, place: str) -> None:
        """Count one row that is not kept."""
        self.dropped[rejected.reason] += 1
        self.examples.setdefault(rejected.reason, f"{place}: {rejected.detail}")

    def sift(self, judge: Callable[[Conversation], None]) -> None:
        """Keep the rows that `judge` lets pass; it raises RowRejected for the others."""
        kept = []
        for conversation in self.rows:
            try:
                judge(conversation)
            except RowRejected as rejected:
                self.drop(rejected, f"row {conversation.id}")
            else:
                kept.append(conversation)
        self.rows = kept

    def to_json(self) -> dict[str, Any]:
        """Plain data, reasons sorted by name."""
        return {
            "source": self.label,
            "name": self.spec.name,
            "weight": self.spec.weight,
            "read": self.read,
            "kept": self.kept,
            "not_drawn": self.not_drawn,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
            "examples": dict(sorted(self.examples.items())),
        }


def read_source(spec: SourceSpec, keep_answers: bool = True, watch: Callable[[int], None] = lambda rows: None) -> Source:
    """Read one source whole and turn its rows into conversations.

    Args:
        keep_answers: leave the answers that rows bring in place; otherwise only what the target is to be asked stays.
        watch: called now and then with the number of rows read so far.

    Raises:
        CorpusError: a source that is missing, empty, unreadable or without a usable row.
    """
    label, rows = _open(spec)
    source = Source(spec, label)
    first_rejected = ""
    for place, row in islice(rows, spec.first):
        source.read += 1
        if source.read % _WATCHED == 0:
            watch(source.read)
        try:
            if isinstance(row, RowRejected):
                raise row
            conversation = parse_row(row, label, spec.domain, source.repaired)
        except RowRejected as rejected:
            source.drop(rejected, place)
            first_rejected = first_rejected or f"{place}: {rejected}"
            continue
        source.rows.append(conversation if keep_answers else conversation.questions())
    watch(source.read)
    if not source.read:
        raise CorpusError(f"{spec.name} holds no rows. Fill it with one JSON object a line, each with one of {', '.join(LAYOUTS)}.")
    if not source.rows:
        raise CorpusError(
            f"none of the {source.read} rows of {spec.name} can be used. The first one, {first_rejected}. "
            f"A row is a JSON object with one of {', '.join(LAYOUTS)}; mend the file or name another one."
        )
    return source


def _open(spec: SourceSpec) -> tuple[str, Iterator[tuple[str, Any]]]:
    """The label of a source and its raw rows with their places."""
    if spec.name.startswith("bundled"):
        if spec.name not in BUNDLED:
            raise CorpusError(f"unknown bundled prompts {spec.name!r}. There are {' and '.join(BUNDLED)}.")
        return spec.label or "bundled", bundled_rows(spec.name.removeprefix("bundled:"))
    if spec.name.startswith(HUB):
        name = spec.name.removeprefix(HUB)
        return spec.label or name.rstrip("/").rpartition("/")[2], hub_rows(HubSet(name, spec.subset, spec.split))
    path = Path(spec.name).expanduser()
    return spec.label or path.stem, _file_rows(path)


def bundled_rows(part: str) -> Iterator[tuple[str, Any]]:
    """The rows of one of the files that ship with the project: train, heldout or benchmarks."""
    return _rows(resources.files("corpus").joinpath("prompts", f"{part}.jsonl").read_bytes().splitlines())


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        raise CorpusError(
            f"{path} is a folder, not a prompt file. Name a .jsonl or .json file in it, or hf:{path} for a data set's folder."
        )
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".json":
                yield from _array_rows(path, file.read())
            else:
                yield from _rows(file)
    except FileNotFoundError as error:
        raise CorpusError(
            f"no prompt file {path}. Check the path; hub data sets are written hf:ORG/NAME, the project's own prompts {BUNDLED[0]}."
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
