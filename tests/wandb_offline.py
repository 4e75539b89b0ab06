"""Reads what W&B leaves offline, `run-ID.wandb`: records in a log of 32 KiB blocks, each `checksum, length, type` and a protobuf."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The whole records of a file, in order; a last one that was cut short is left out."""
    data, at, parts = path.read_bytes(), _HEADER, bytearray()
    assert data[:4] == b":W&B"
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        piece, at = data[at + _HEADER : at + _HEADER + length], at + _HEADER + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return
        parts = parts + piece if kind in (_MIDDLE, _LAST) else bytearray(piece)
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(bytes(parts))
            yield record


def offline_run(path: Path) -> dict[str, Any]:
    """Id, name, group, configuration, rows and summary of one file."""
    found: dict[str, Any] = {"config": {}, "rows": [], "summary": {}, "ended": False}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.update(id=record.run.run_id, name=record.run.display_name, group=record.run.run_group)
            found["config"].update(_items(record.run.config.update))
        elif kind == "config":
            found["config"].update(_items(record.config.update))
        elif kind == "history":
            found["rows"].append(_items(record.history.item))
        elif kind == "summary":
            found["summary"].update(_items(record.summary.update))
        elif kind == "exit":
            found["ended"] = True
    return found


def offline_runs(folder: Path) -> list[dict[str, Any]]:
    """All of a folder, by time."""
    return [offline_run(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
