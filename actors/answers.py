"""Answers on storage: immutable parts, and an index that gives every row a number that never changes.

<answers>/settings.json              how they were generated; other settings are refused, never mixed in
<answers>/parts/<hash>.arrow         rows, written by the actor that generated them; those of a conversation lie side by side in one part
<answers>/index/<first>-<count>.json written after its part, by the driver alone; a part without one is garbage
<answers>/card.json, card.md         what the answers are, as of the last finished run (`corpus.card`)
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from actors.errors import ActorError
from corpus.answers import AnsweredRow, decode_answers, encode_answers, training_rows, usable
from storage.object_store import ObjectStore

_INDEX = re.compile(r"index/(\d{10})-(\d{8})\.json")


@dataclass(frozen=True)
class Part:
    """A written part: its key, the ids of its conversations, and how many rows of each finish reason it holds.

    `engine` names who answered; `seconds` passed since the part before it was registered, or since the run began.
    """

    key: str
    rows: int
    conversation_ids: tuple[str, ...]
    reasons: dict[str, int]
    answer_tokens: int
    engine: str = "unknown"
    seconds: float = 0.0


def write_part(store: ObjectStore, rows: Sequence[AnsweredRow], settings: Mapping[str, Any], engine: str) -> Part:
    """Write rows under their content hash; they count only once `AnswerStore.register` has indexed them."""
    data = encode_answers(rows, settings)
    key = f"parts/{hashlib.blake2b(data, digest_size=16).hexdigest()}.arrow"
    store.put(key, data)
    return Part(
        key=key,
        rows=len(rows),
        conversation_ids=tuple(sorted({row.conversation_id for row in rows})),
        reasons=dict(Counter(row.finish_reason for row in rows)),
        answer_tokens=sum(len(row.answer_ids) for row in rows),
        engine=engine,
    )


@dataclass
class AnswerStore:
    """Reads and grows one answers folder. One writer at a time: the driver of `regenerate`."""

    store: ObjectStore
    settings: dict[str, Any] = field(default_factory=dict)
    _spans: list[tuple[int, int, Part]] = field(default_factory=list)
    _loaded: tuple[str, list[AnsweredRow]] | None = None

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Read the index anew."""
        spans = []
        for key in self.store.list("index"):
            match = _INDEX.fullmatch(key)
            if match is None:
                raise ActorError(f"{self.store.url(key)} is not an index entry; remove it")
            spans.append((int(match[1]), int(match[2]), self._read_index(key)))
        self._spans = sorted(spans, key=lambda span: span[0])
        expected = 0
        for first, count, _ in self._spans:
            if first != expected:
                raise ActorError(f"{self.store.settings.root + '/index'} has a hole: rows {expected} to {first - 1} are missing")
            expected = first + count

    def _read_index(self, key: str) -> Part:
        try:
            value = json.loads(self.store.get(key))
            return Part(**{**value, "conversation_ids": tuple(value["conversation_ids"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ActorError(f"{self.store.url(key)} is damaged ({error!r}); remove it and run `regenerate` again") from error

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Bind the folder to how its rows are generated. A folder without rows is free, whatever an earlier run meant to do with it.

        Raises:
            ActorError: it holds rows generated otherwise; names each differing setting.
        """
        ours, theirs = json.loads(json.dumps(dict(settings))), self.stored_settings()
        self.settings = ours
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing and self.rows:
            told = "; ".join(f"{key}: there {theirs.get(key)!r}, asked {ours.get(key)!r}" for key in differing)
            raise ActorError(
                f"{self.store.settings.root} holds answers generated otherwise ({told}). Answers are never mixed: ask for the same, or "
                "let new ones go to a corpus of another name (`corpus.name=...` in `prepare`, here and in `cache`), or remove the folder."
            )
        if differing:
            self.store.put("settings.json", json.dumps(ours, indent=2).encode())

    def stored_settings(self) -> dict[str, Any]:
        """How the rows that are here were generated; empty where none ever were."""
        try:
            return dict(json.loads(self.store.get("settings.json")))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ActorError(f"{self.store.url('settings.json')} is damaged ({error}); remove the folder, or copy it again") from error

    @property
    def rows(self) -> int:
        """How many rows are indexed; row numbers are 0 .. rows-1."""
        return sum(count for _, count, _ in self._spans)

    @property
    def parts(self) -> list[Part]:
        return [part for _, _, part in self._spans]

    def conversation_ids(self) -> set[str]:
        """Conversations already answered."""
        return {conversation for _, _, part in self._spans for conversation in part.conversation_ids}

    def register(self, part: Part, seconds: float) -> Part:
        """Give the part's rows the next numbers; `seconds` is what they took.

        Raises:
            ActorError: somebody else has registered rows since this store was opened.
        """
        first = self.rows
        if self.store.list(f"index/{first:010d}-"):
            raise ActorError(
                f"another `regenerate` is writing to {self.store.settings.root}. Let one finish; the other then goes on from there."
            )
        part = replace(part, seconds=seconds)
        self.store.put(f"index/{first:010d}-{part.rows:08d}.json", json.dumps(asdict(part)).encode())
        self._spans.append((first, part.rows, part))
        return part

    def read(self, start: int, stop: int) -> list[AnsweredRow]:
        """Rows [start, stop), in order."""
        rows: list[AnsweredRow] = []
        for first, count, part in self._spans:
            if first < stop and start < first + count:
                rows += self._part(part)[max(start - first, 0) : stop - first]
        if len(rows) != stop - start:
            raise ActorError(f"{self.store.settings.root} has {self.rows} rows; rows {start} to {stop - 1} were asked for")
        return rows

    def read_around(self, start: int, stop: int) -> list[tuple[int, AnsweredRow]]:
        """Rows [start, stop) with their numbers, and with them what else belongs to the first and the last one's conversation."""
        found: list[tuple[int, AnsweredRow]] = []
        for first, count, part in self._spans:
            if first < stop and start < first + count:
                rows, low, high = self._part(part), max(start - first, 0), min(stop - first, count)
                while low > 0 and rows[low - 1].conversation_id == rows[low].conversation_id:
                    low -= 1
                while high < count and rows[high].conversation_id == rows[high - 1].conversation_id:
                    high += 1
                found += enumerate(rows[low:high], first + low)
        return found

    def __iter__(self) -> Iterator[AnsweredRow]:
        for _, _, part in self._spans:
            yield from self._part(part)

    def _part(self, part: Part) -> list[AnsweredRow]:
        if self._loaded is None or self._loaded[0] != part.key:
            rows, _ = decode_answers(self.store.get(part.key), self.store.url(part.key))
            if len(rows) != part.rows:
                raise ActorError(
                    f"{self.store.url(part.key)} holds {len(rows)} rows, its index says {part.rows}; remove both, run `regenerate`"
                )
            self._loaded = (part.key, rows)
        return self._loaded[1]


def frequent_tokens(
    answers: Iterable[AnsweredRow], row_ids: Collection[str], stop_ids: Collection[int], count: int, vocabulary: int
) -> tuple[int, ...]:
    """The `count` ids below `vocabulary` that are supervised most often in the cached rows, ascending; ties and what is left by id."""
    said = np.zeros(vocabulary, dtype=np.int64)
    turns: list[AnsweredRow] = []
    for row in answers:
        turns = [*turns, row] if turns and turns[-1].conversation_id == row.conversation_id else [row]
        if row.row_id in row_ids:
            # It may hold earlier turns as well.
            cached = training_rows(turn for turn in turns if turn is row or usable(turn, stop_ids))[-1]
            said += np.bincount(cached.input_ids[cached.loss_mask()], minlength=vocabulary)[:vocabulary]
            turns = []
    return tuple(sorted(np.argsort(-said, kind="stable")[:count].tolist()))


def answers_hash(answers: AnswerStore) -> str:
    """Changes when the rows do: the hash over the parts' content-named keys, in order."""
    return hashlib.blake2b("\n".join(part.key for part in answers.parts).encode(), digest_size=8).hexdigest()
