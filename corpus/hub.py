"""Data sets of the Hugging Face hub, or local folders in the same layout, read as a stream with the `datasets` library.

Nothing is downloaded whole: rows come as they are needed. A folder is read by the builder that its files ask for (parquet, JSON,
CSV), as on the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus.errors import CorpusError, RowRejected

_BATCH = 256
_PATIENCE = 10  # seconds to wait for the hub's first word


class HubUnreachable(CorpusError):
    """The hub cannot be asked: no network, or offline mode."""


@dataclass(frozen=True)
class HubSet:
    """One split of a data set.

    Attributes:
        name: ORG/NAME on the hub, or a local folder.
        subset: configuration name, for data sets that have several.
        split: "train", "test", ...
        files: read these JSON files of the data set alone; paths or patterns inside it.
    """

    name: str
    subset: str | None = None
    split: str = "train"
    files: tuple[str, ...] = ()


def hub_rows(data: HubSet) -> Iterator[tuple[str, Any]]:
    """The rows in the data set's order, each with its place; one that is not UTF-8 yields its rejection in place of a value.

    Raises:
        HubUnreachable: no network.
        CorpusError: no such data set, subset or split, or files that the builder cannot read.
    """
    local = Path(data.name).expanduser().is_dir()
    if not local:
        _check_reachable(data.name)
    number = 0
    try:
        for table in _stream(data, local):
            try:
                rows: list[Any] = table.to_pylist()
            except UnicodeDecodeError:
                rows = [_decode(table, i) for i in range(table.num_rows)]
            for row in rows:
                number += 1
                yield f"row {number}", row
    except CorpusError:
        raise
    except Exception as error:  # the builders raise errors of their own, of pyarrow, of fsspec and of the hub's client
        where = f"after {number} rows" if number else "before its first row"
        raise CorpusError(
            f"cannot read the data set {_told(data)} ({where}): {type(error).__name__}: {_first_line(error)}. "
            "Check its name, subset and split on the hub, HF_TOKEN where it is gated, and the network."
        ) from error


def _stream(data: HubSet, local: bool) -> Iterator[Any]:
    """Arrow tables of a few rows each: decoding them is left to the caller, who can tell a broken row from its neighbours."""
    import datasets  # takes a second to import, and files can be read without it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    name = str(Path(data.name).expanduser().resolve()) if local else data.name
    if data.files:
        root = name if local else f"hf://datasets/{name}"
        files = {data.split: [f"{root}/{file}" for file in data.files]}
        stream = datasets.load_dataset("json", data_files=files, split=data.split, streaming=True)
    else:
        stream = datasets.load_dataset(name, data.subset, split=data.split, streaming=True)
    return iter(stream.with_format("arrow").iter(batch_size=_BATCH))


def _decode(table: Any, index: int) -> Any:
    try:
        return table.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowRejected("invalid_utf8", f"byte {error.start} of a text is not UTF-8")


def _check_reachable(name: str) -> None:
    """One question to the hub: its client would try six times and tell of each."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
            return
        except Exception as error:
            why = _first_line(error)
    raise HubUnreachable(
        f"the hub cannot be reached for the data set {name} ({why}). Check the network, or give a local copy of it: hf:/path/to/folder."
    )


def _told(data: HubSet) -> str:
    return " ".join([data.name, *([f"({data.subset})"] if data.subset else []), f"split {data.split}"])


def _first_line(error: BaseException) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
