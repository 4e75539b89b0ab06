"""Checkpoints as safetensors and JSON, on a local folder or an object store, without rename.

<prefix>/<content hash>/tensors.safetensors, NAME.json, index.json   data; index.json is written last and lists sizes and checksums
<prefix>/last.json, best.json                                        small pointers, written after the data that they name

A checkpoint counts only if every byte that its index lists is there, so a torn one is passed over for the one before it.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from storage.contract import Contract, DraftLayout, record_from_json
from storage.errors import StorageError, StorageUnavailable
from storage.object_store import ObjectStore, check_key

log = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TENSORS = "tensors.safetensors"
_INDEX = "index.json"


def save_checkpoint(
    store: ObjectStore,
    prefix: str,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Any],
    which: Sequence[str] = ("last",),
    keep: int = 2,
) -> str:
    """Write a checkpoint, then point to it. Checkpoints that no pointer names any more are deleted.

    One writer per prefix.

    Args:
        tensors: by name; any device and dtype that safetensors knows.
        files: JSON-able documents by name (lower case, without suffix).
        which: pointers to move, in that order: `last`, `best` or both.
        keep: how many checkpoints a pointer names, newest first: what follows the first is there should that be torn. `best` names two
            at most.

    Returns:
        Key of the folder that was written.
    """
    check_key(prefix)
    if not which or any(not _NAME.fullmatch(name) for name in [*files, *which]) or "index" in files:
        raise StorageError(
            f"names of checkpoint files and pointers must be lower case identifiers other than 'index', not {[*files, *which]}"
        )
    documents = {f"{name}.json": _json_bytes(content) for name, content in files.items()}
    documents[_TENSORS] = _tensor_bytes(tensors)
    listing = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sorted(documents.items())}
    folder = hashlib.sha256(_json_bytes(listing)).hexdigest()[:20]
    sequence = 1 + max((index["sequence"] for index in _indices(store, prefix).values()), default=0)
    for name, data in documents.items():
        store.put(f"{prefix}/{folder}/{name}", data)
    store.put(f"{prefix}/{folder}/{_INDEX}", _sealed({"files": listing, "sequence": sequence}))
    for name in which:
        folders = [folder, *(old for old in _pointer(store, prefix, name) if old != folder)]
        store.put(f"{prefix}/{name}.json", _sealed({"folders": folders[: keep if name == "last" else min(keep, 2)]}))
    _prune(store, prefix)
    return f"{prefix}/{folder}"


def load_checkpoint(store: ObjectStore, prefix: str, which: str = "last") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint that the pointer `which` names; where that is torn, the newest intact one before it (with a warning in the log).

    Returns:
        (tensors on the CPU, JSON documents by name).

    Raises:
        StorageError: there is none, or none is intact.
    """
    return _first_intact(store, prefix, which, lambda folder: _load_folder(store, folder))


def checkpoint_documents(store: ObjectStore, prefix: str, which: str = "last") -> dict[str, Any]:
    """The JSON documents of the checkpoint that `load_checkpoint` would pick; of its tensors only the size is looked at.

    Raises:
        StorageError: there is none, or none is intact.
    """
    return _first_intact(store, prefix, which, lambda folder: _load_documents(store, folder))


def has_checkpoint(store: ObjectStore, prefix: str, which: str = "last") -> bool:
    """Whether a pointer of that name exists."""
    return store.exists(f"{check_key(prefix)}/{which}.json")


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter as a plain folder: its trainable tensors, its configuration, and what it was trained on."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    contract: Contract
    layout: DraftLayout


def save_drafter(store: ObjectStore, drafter: DrafterFiles) -> None:
    """Write model.safetensors, config.json and contract.json at the root of `store`; contract.json last, with the weights' checksum."""
    weights = _tensor_bytes(drafter.tensors)
    store.put("model.safetensors", weights)
    store.put("config.json", _json_bytes(drafter.config))
    record = {
        "contract": json.loads(drafter.contract.to_json()),
        "layout": asdict(drafter.layout),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    store.put("contract.json", _json_bytes(record))


def load_drafter(store: ObjectStore) -> DrafterFiles:
    """Read such a folder; StorageError where a file is missing, damaged, or belongs to other weights."""
    where = store.settings.root
    parts = {}
    for name in ("contract.json", "config.json", "model.safetensors"):
        try:
            parts[name] = store.get(name)
        except FileNotFoundError:
            raise StorageError(f"{where} is not a drafter checkpoint: it has no {name}. Give the folder that training reported") from None
    record, config = _parse(parts["contract.json"], store.url("contract.json")), _parse(parts["config.json"], store.url("config.json"))
    if record.keys() != {"contract", "layout", "weights_sha256"}:
        raise StorageError(f"{store.url('contract.json')} is not a drafter's contract: it must hold contract, layout and weights_sha256")
    if hashlib.sha256(parts["model.safetensors"]).hexdigest() != record["weights_sha256"]:
        raise StorageError(f"{store.url('model.safetensors')} is torn or was replaced: its checksum differs from contract.json")
    contract = record_from_json(Contract, record["contract"], store.url("contract.json"))
    layout = record_from_json(DraftLayout, record["layout"], store.url("contract.json"))
    return DrafterFiles(_tensors(parts["model.safetensors"], store.url("model.safetensors")), config, contract, layout)


def load_weights(store: ObjectStore) -> dict[str, Tensor]:
    """All tensors of a model folder: those of model.safetensors, or of the files that model.safetensors.index.json names.

    Raises:
        StorageError: there is neither, or a file is missing or damaged.
    """
    index = "model.safetensors.index.json"
    names = ["model.safetensors"]
    if store.exists(index):
        names = sorted(set(map(str, dict(_parse(store.get(index), store.url(index)).get("weight_map", {})).values())))
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors.update(_tensors(store.get(name), store.url(name)))
        except FileNotFoundError:
            raise StorageError(f"{store.settings.root} has no {name}: it is no checkpoint in safetensors, or incomplete") from None
    return tensors


def _first_intact(store: ObjectStore, prefix: str, which: str, load: Callable[[str], Loaded]) -> Loaded:
    check_key(prefix)
    folders = _pointer(store, prefix, which)
    if not folders and (which == "last" or not store.exists(f"{prefix}/{which}.json")):
        known = _indices(store, prefix) if which == "last" else {}
        folders = sorted(known, key=lambda folder: known[folder]["sequence"], reverse=True)
    problems = []
    for folder in folders:
        try:
            return load(f"{prefix}/{folder}")
        except StorageUnavailable:
            raise  # it may be whole: going back behind it would be hasty
        except (StorageError, FileNotFoundError) as error:
            problems.append(str(error))
            log.warning("checkpoint passed over: %s", error)
    detail = f" ({'; '.join(problems)})" if problems else ""
    raise StorageError(
        f"there is no intact '{which}' checkpoint under {store.url(prefix)}{detail}. Start training anew, or correct the path"
    )


def _load_folder(store: ObjectStore, folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    listing = _unseal(store, f"{folder}/{_INDEX}")["files"]
    key = f"{folder}/{_TENSORS}"
    tensors = _tensors(_intact(store, key, listing[_TENSORS]), store.url(key))
    return tensors, _documents(store, folder, listing)


def _load_documents(store: ObjectStore, folder: str) -> dict[str, Any]:
    listing = _unseal(store, f"{folder}/{_INDEX}")["files"]
    key, expected = f"{folder}/{_TENSORS}", listing[_TENSORS]["bytes"]
    if (size := store.size(key)) != expected:
        raise StorageError(f"{store.url(key)} is torn: {size} bytes where {expected} were written")
    return _documents(store, folder, listing)


def _documents(store: ObjectStore, folder: str, listing: Mapping[str, Any]) -> dict[str, Any]:
    documents = {}
    for name, expected in listing.items():
        if name != _TENSORS:
            key = f"{folder}/{name}"
            documents[name.removesuffix(".json")] = _parse(_intact(store, key, expected), store.url(key))
    return documents


def _intact(store: ObjectStore, key: str, expected: Mapping[str, Any]) -> bytes:
    data = store.get(key)
    if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise StorageError(f"{store.url(key)} is torn: {len(data)} bytes where {expected['bytes']} were written, or changed")
    return data


def _pointer(store: ObjectStore, prefix: str, which: str) -> list[str]:
    """Folders that a pointer names, newest first; empty where it is missing or torn."""
    try:
        return list(_unseal(store, f"{prefix}/{which}.json")["folders"])
    except StorageUnavailable:
        raise
    except (FileNotFoundError, StorageError):
        return []


def _indices(store: ObjectStore, prefix: str) -> dict[str, dict[str, Any]]:
    """Readable indices of all complete folders, by folder."""
    found = {}
    for key in store.list(f"{prefix}/"):
        folder, _, name = key.removeprefix(f"{prefix}/").rpartition("/")
        if name == _INDEX and "/" not in folder:
            try:
                found[folder] = _unseal(store, key)
            except (FileNotFoundError, StorageError):
                continue
    return found


def _prune(store: ObjectStore, prefix: str) -> None:
    keys = store.list(f"{prefix}/")
    pointers = [key for key in keys if "/" not in key.removeprefix(f"{prefix}/")]
    named = [_pointer(store, prefix, key.removeprefix(f"{prefix}/").removesuffix(".json")) for key in pointers]
    if not all(named):
        return  # a torn pointer: what it named is unknown, so nothing may go
    needed = {folder for folders in named for folder in folders}
    for key in keys:
        folder, _, rest = key.removeprefix(f"{prefix}/").partition("/")
        if rest and re.fullmatch(r"[0-9a-f]{20}", folder) and folder not in needed:
            store.delete(key)


def _tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    # Clones only where two names share memory: safetensors refuses those, and silently dropping one would lose a name.
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        address = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if address in seen or value.untyped_storage().nbytes() != value.nbytes else value
        seen.add(address)
    return safetensors.torch.save(plain)


def _tensors(data: bytes, where: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError) as error:
        raise StorageError(f"{where} is not a readable safetensors file: {error}") from error


def _sealed(document: dict[str, Any]) -> bytes:
    return _json_bytes({**document, "checksum": hashlib.sha256(_json_bytes(document)).hexdigest()})


def _unseal(store: ObjectStore, key: str) -> dict[str, Any]:
    document = _parse(store.get(key), store.url(key))
    checksum = document.pop("checksum", None)
    if checksum != hashlib.sha256(_json_bytes(document)).hexdigest():
        raise StorageError(f"{store.url(key)} is torn or was changed: its checksum differs")
    return document


def _json_bytes(document: Any) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise StorageError(f"{where} is not readable JSON ({error}): it is torn or damaged") from error
    if not isinstance(document, dict):
        raise StorageError(f"{where} must be a JSON object")
    return document
