"""Prompts that are answered while they are cached: numbered for good, so that a cache can be resumed and grown.

<cache>/prompts/<first>-<count>.jsonl   conversations `first` and following; immutable
<cache>/source.json                     where the cache's rows come from, and how answers are sampled; another source is refused
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.errors import ActorError
from corpus.conversation import Conversation
from corpus.rows import parse_row
from storage.object_store import ObjectStore

_PART = re.compile(r"prompts/(\d{10})-(\d{8})\.jsonl")
_PART_ROWS = 1024


@dataclass
class PromptStore:
    """Row n of the cache is the answer to conversation n. One writer at a time: the driver of `cache`."""

    cache: ObjectStore
    _parts: list[tuple[int, int, str]] = field(default_factory=list)
    _loaded: tuple[str, list[Conversation]] | None = None

    def __post_init__(self) -> None:
        expected = 0
        for key in self.cache.list("prompts/"):
            match = _PART.fullmatch(key)
            if match is None or int(match[1]) != expected:
                raise ActorError(f"{self.cache.url(key)} does not follow on row {expected - 1}: a part is missing, or this one is not ours")
            self._parts.append((expected, int(match[2]), key))
            expected += int(match[2])

    @property
    def rows(self) -> int:
        """How many conversations have a number."""
        return self._parts[-1][0] + self._parts[-1][1] if self._parts else 0

    def add(self, conversations: Iterable[Conversation]) -> int:
        """Number what is new, in an order that does not depend on the input's; returns how many rows there are then."""
        known = {conversation.id for part in self._parts for conversation in self._read(part)}
        new = sorted({c.id: c for c in conversations if c.id not in known}.values(), key=lambda conversation: conversation.id)
        for start in range(0, len(new), _PART_ROWS):
            part, first = new[start : start + _PART_ROWS], self.rows
            key = f"prompts/{first:010d}-{len(part):08d}.jsonl"
            self.cache.put(key, "".join(json.dumps(c.to_row(), ensure_ascii=False) + "\n" for c in part).encode())
            self._parts.append((first, len(part), key))
        return self.rows

    def read(self, start: int, stop: int) -> list[Conversation]:
        """Conversations [start, stop), in order."""
        found: list[Conversation] = []
        for part in self._parts:
            first, count, _ = part
            if first < stop and start < first + count:
                found += self._read(part)[max(start - first, 0) : stop - first]
        if len(found) != stop - start:
            raise ActorError(f"{self.cache.url('prompts')} has {self.rows} rows; rows {start} to {stop - 1} were asked for")
        return found

    def _read(self, part: tuple[int, int, str]) -> list[Conversation]:
        _, count, key = part
        if self._loaded is None or self._loaded[0] != key:
            rows = [parse_row(json.loads(line), "", "") for line in self.cache.get(key).splitlines()]
            if len(rows) != count:
                raise ActorError(f"{self.cache.url(key)} holds {len(rows)} conversations, its name says {count}: it was changed")
            self._loaded = (key, rows)
        return self._loaded[1]
