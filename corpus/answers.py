"""Answers as token ids: those that the target gave, as the engine consumed and produced them, and those that rows brought along.

The loss mask of such a row is exactly the answer, the stop token included; nothing is tokenized again. A row enters training only if
`unusable` finds nothing wrong with it; everything else stays in the file and is counted, each kind apart.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from corpus.errors import CorpusError
from corpus.loops import LoopRule, is_looping
from corpus.masked import MaskedRow

STOP, LENGTH, FAILED = "stop", "length", "failed"
FINISH_REASONS = (STOP, LENGTH, FAILED)
REASONS = (FAILED, "empty", "truncated", "looping", "no_stop_token")
_SCHEMA_VERSION = "1"
_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("conversation_id", pa.string()),
        ("turn", pa.int32()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("prompt_ids", pa.large_list(pa.int32())),
        ("answer_ids", pa.large_list(pa.int32())),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("crc32", pa.uint32()),
    ]
)


@dataclass(frozen=True, eq=False)
class AnsweredRow:
    """One answer.

    Attributes:
        conversation_id: content hash of the conversation that was asked.
        turn: which answer of the conversation this is, from 0.
        prompt_ids: [P] int32, what the engine consumed.
        answer_ids: [G] int32, what it produced, the stop token included where it gave one.
        finish_reason: "stop", "length" (hit the limit of new tokens or of the context), or "failed".
        error: what went wrong, for failed rows.
    """

    conversation_id: str
    turn: int
    source: str
    domain: str
    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    finish_reason: str
    error: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "answer_ids"):
            object.__setattr__(self, name, _int32(getattr(self, name), f"{name} of row {self.row_id}"))
        if self.finish_reason not in FINISH_REASONS:
            raise CorpusError(f"row {self.row_id} has finish_reason {self.finish_reason!r}; known are {', '.join(FINISH_REASONS)}.")
        if self.turn < 0 or not self.conversation_id:
            raise CorpusError(f"row {self.row_id} needs a conversation id and a turn >= 0.")

    @property
    def row_id(self) -> str:
        """Key of this answer, the same in every run over the same conversation."""
        return answer_row_id(self.conversation_id, self.turn)

    @property
    def span(self) -> tuple[int, int]:
        """The supervised positions of prompt + answer, [start, stop)."""
        return len(self.prompt_ids), len(self.prompt_ids) + len(self.answer_ids)

    def masked(self) -> MaskedRow:
        """The row as training reads it: prompt + answer, the answer supervised."""
        ids = np.concatenate([self.prompt_ids, self.answer_ids])
        return MaskedRow(self.row_id, self.conversation_id, self.source, self.domain, ids, (self.span,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnsweredRow) and _plain(self) == _plain(other)

    def __hash__(self) -> int:
        return hash(self.row_id)


def answer_row_id(conversation_id: str, turn: int) -> str:
    """`<conversation>.<turn>`."""
    return f"{conversation_id}.{turn}"


# -- what may be trained on


def unusable(row: AnsweredRow, stop_ids: Collection[int], loops: LoopRule | None = None, keep_truncated: bool = False) -> str | None:
    """Why a row stays out of training, None where it may go in. The first of these that holds:

    failed          the engine gave no answer
    empty           no token before the stop token
    truncated       finish_reason is "length"; its end is the limit's, not the target's
    looping         the answer repeats itself (`corpus.loops`); truncated rows that loop count as truncated
    no_stop_token   finish_reason is "stop", yet the last token is none of `stop_ids`: the drafter would never learn to stop

    Args:
        stop_ids: `ChatTemplate.stop_ids` of the target.
        loops: what counts as a loop, `LoopRule()` by default.
        keep_truncated: let truncated rows in, unless they loop.
    """
    if row.finish_reason == FAILED or not len(row.prompt_ids):
        return FAILED
    if len(row.answer_ids) == 0 or (len(row.answer_ids) == 1 and int(row.answer_ids[-1]) in stop_ids):
        return "empty"
    truncated = row.finish_reason == LENGTH
    if truncated and not keep_truncated:
        return "truncated"
    if is_looping(row.answer_ids, loops or LoopRule()):
        return "looping"
    if not truncated and int(row.answer_ids[-1]) not in stop_ids:
        return "no_stop_token"
    return None


def usable(row: AnsweredRow, stop_ids: Collection[int], loops: LoopRule | None = None, keep_truncated: bool = False) -> bool:
    """Whether a row may be trained on; see `unusable`."""
    return unusable(row, stop_ids, loops, keep_truncated) is None


def training_rows(rows: Iterable[AnsweredRow]) -> list[MaskedRow]:
    """Usable answers as training reads them, ordered by conversation.

    Turns of one conversation become one row, named after the last of them, where each prompt's ids start with all ids of the turn
    before (prompt + answer); where the template breaks that, for instance by dropping earlier thinking, every turn stays a row of its
    own.

    Args:
        rows: in any order. A turn that is left out is read by the later ones and not supervised in them.

    Raises:
        CorpusError: two rows with the same id.
    """
    by_conversation: dict[str, dict[int, AnsweredRow]] = {}
    for row in rows:
        turns = by_conversation.setdefault(row.conversation_id, {})
        if row.turn in turns:
            raise CorpusError(f"the answer {row.row_id} occurs twice. Read each part of the answers once, or build them again.")
        turns[row.turn] = row
    return [joined for _, turns in sorted(by_conversation.items()) for joined in _joined([turns[turn] for turn in sorted(turns)])]


def answers_within(row: MaskedRow, first_turn: int, stop_ids: Collection[int]) -> list[AnsweredRow]:
    """The answers that a masked row holds, each with all before it as its prompt: what `training_rows` joins again.

    An answer that does not end with a stop token was cut, and counts as one that hit the limit.
    """
    return [
        AnsweredRow(
            conversation_id=row.conversation_id,
            turn=turn,
            source=row.source,
            domain=row.domain,
            prompt_ids=row.input_ids[:start],
            answer_ids=row.input_ids[start:stop],
            finish_reason=STOP if int(row.input_ids[stop - 1]) in stop_ids else LENGTH,
        )
        for turn, (start, stop) in enumerate(row.spans, first_turn)
    ]


def _joined(turns: Sequence[AnsweredRow]) -> list[MaskedRow]:
    groups: list[list[AnsweredRow]] = []
    for row in turns:
        if groups and _extends(groups[-1][-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_join(group) for group in groups]


def _extends(before: AnsweredRow, after: AnsweredRow) -> bool:
    stop = before.span[1]
    if after.turn != before.turn + 1 or len(after.prompt_ids) < stop:
        return False
    known = np.concatenate([before.prompt_ids, before.answer_ids])
    return bool(np.array_equal(after.prompt_ids[:stop], known))


def _join(group: Sequence[AnsweredRow]) -> MaskedRow:
    last = group[-1].masked()
    return MaskedRow(last.row_id, last.conversation_id, last.source, last.domain, last.input_ids, tuple(row.span for row in group))


# -- bytes in and out


def encode_answers(rows: Iterable[AnsweredRow], settings: Mapping[str, Any]) -> bytes:
    """Answers as an Arrow IPC file.

    Args:
        rows: answers with different row ids.
        settings: everything that decided the answers (target, sampling, template hash); kept in the schema's metadata as JSON, so that
            answers given under other settings are never mixed in.

    Raises:
        CorpusError: two rows with the same id.
    """
    rows = list(rows)
    doubled = [row_id for row_id, count in Counter(row.row_id for row in rows).items() if count > 1]
    if doubled:
        raise CorpusError(f"{len(doubled)} answers have a row id that occurs twice, {doubled[0]} first. Each answer is written once.")
    metadata = {"schema_version": _SCHEMA_VERSION, "settings": json.dumps(dict(settings), sort_keys=True)}
    columns = [
        [row.row_id for row in rows],
        [row.conversation_id for row in rows],
        [row.turn for row in rows],
        [row.source for row in rows],
        [row.domain for row in rows],
        [row.prompt_ids for row in rows],
        [row.answer_ids for row in rows],
        [row.finish_reason for row in rows],
        [row.error for row in rows],
        [_checksum(row) for row in rows],
    ]
    arrays = [pa.array(column, type=kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)]
    batch = pa.record_batch(arrays, schema=_SCHEMA.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def decode_answers(data: bytes, where: str) -> tuple[list[AnsweredRow], dict[str, Any]]:
    """Read back what `encode_answers` wrote; returns the rows and the settings.

    Args:
        where: the name under which the bytes are stored, for error messages.

    Raises:
        CorpusError: truncated or damaged bytes, another schema, or a row whose checksum does not match.
    """
    remedy = "Delete it and run regenerate again; finished parts are kept."
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        table.validate(full=True)
        columns = table.to_pydict() if table.num_rows == 0 else {name: _column(table, name) for name in table.column_names}
    except (pa.ArrowInvalid, pa.ArrowException, OSError, ValueError) as error:
        raise CorpusError(f"{where} is no complete file of answers ({error}). {remedy}") from error
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if metadata.get("schema_version") != _SCHEMA_VERSION or not table.schema.equals(_SCHEMA):
        raise CorpusError(
            f"{where} has the answers' schema version {metadata.get('schema_version')}, this code reads {_SCHEMA_VERSION}. {remedy}"
        )
    rows = []
    for i in range(table.num_rows):
        values = {name: column[i] for name, column in columns.items() if name not in ("row_id", "crc32")}
        row = AnsweredRow(**values)
        if columns["row_id"][i] != row.row_id or columns["crc32"][i] != _checksum(row):
            raise CorpusError(f"row {i} ({columns['row_id'][i]}) of {where} is damaged: its checksum does not match. {remedy}")
        rows.append(row)
    return rows, json.loads(metadata["settings"])


def _column(table: pa.Table, name: str) -> Sequence[Any]:
    """A column as Python values; lists of ids as numpy views."""
    column = table.column(name).combine_chunks()
    if not pa.types.is_large_list(column.type):
        return column.to_pylist()
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def _checksum(row: AnsweredRow) -> int:
    crc = zlib.crc32(row.prompt_ids.tobytes())
    crc = zlib.crc32(row.answer_ids.tobytes(), crc)
    rest = json.dumps([row.row_id, row.source, row.domain, len(row.prompt_ids), row.finish_reason, row.error])
    return zlib.crc32(rest.encode(), crc)


def _plain(row: AnsweredRow) -> tuple[Any, ...]:
    ids = row.prompt_ids.tobytes(), row.answer_ids.tobytes()
    return (row.conversation_id, row.turn, row.source, row.domain, *ids, row.finish_reason, row.error)


def _int32(values: Any, what: str) -> np.ndarray:
    wide = np.asarray(values)
    if wide.size == 0:
        wide = wide.astype(np.int32)
    if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
        raise CorpusError(f"{what}: expected a flat list of whole numbers, got {wide.dtype} of shape {wide.shape}.")
    if wide.size and (wide.min() < 0 or wide.max() > np.iinfo(np.int32).max):
        raise CorpusError(f"{what}: token ids lie in [0, 2^31), found {wide.min()} to {wide.max()}.")
    ids = wide.astype(np.int32)
    ids.setflags(write=False)
    return ids
