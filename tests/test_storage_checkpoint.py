"""Checkpoints: what is saved comes back, and a torn one is passed over for the one before it."""

import json

import pytest
import torch
from storage_cases import contract

from storage.checkpoint import DrafterFiles, has_checkpoint, load_checkpoint, load_drafter, save_checkpoint, save_drafter
from storage.contract import DraftLayout
from storage.errors import StorageError
from storage.object_store import ObjectStore, StorageSettings


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3").store(tmp_path.name)
    return ObjectStore(StorageSettings(str(tmp_path / "run")))


@pytest.fixture
def local(tmp_path):
    return ObjectStore(StorageSettings(str(tmp_path / "run")))


def state(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {
        "w": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "step": torch.tensor(step),
        "rng": torch.arange(9, dtype=torch.uint8),
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def folders(store: ObjectStore) -> set[str]:
    return {key.split("/")[1] for key in store.list("train/") if key.count("/") == 2}


def test_checkpoints_come_back(store):
    assert not has_checkpoint(store, "train")
    save_checkpoint(store, "train", state(1), {"cursor": {"samples": 32}, "config": {"rank": 256}})
    tensors, files = load_checkpoint(store, "train")
    assert equal(tensors, state(1))
    assert files == {"cursor": {"samples": 32}, "config": {"rank": 256}}
    assert has_checkpoint(store, "train")
    assert not has_checkpoint(store, "train", "best")


def test_views_shared_and_transposed_tensors_survive(local):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": base, "b": base, "t": base.T, "row": base[1]}
    save_checkpoint(local, "train", tensors, {})
    assert equal(load_checkpoint(local, "train")[0], tensors)


def test_last_and_best_move_apart_and_old_ones_go(local):
    for step in range(1, 6):
        save_checkpoint(local, "train", state(step), {"at": {"step": step}}, which=("last", "best") if step == 2 else ("last",))
    assert load_checkpoint(local, "train")[1] == {"at": {"step": 5}}
    assert load_checkpoint(local, "train", "best")[1] == {"at": {"step": 2}}
    assert len(folders(local)) == 3  # last, the one before it, best


def test_saving_the_same_again_is_fine(local):
    save_checkpoint(local, "train", state(1), {})
    save_checkpoint(local, "train", state(1), {})
    assert equal(load_checkpoint(local, "train")[0], state(1))


@pytest.mark.parametrize("damage", ["truncate 1", "truncate 1000", "flip", "no tensors", "no index", "cut index", "cut document"])
def test_a_torn_checkpoint_is_never_picked(local, damage):
    for step in (1, 2):
        folder = save_checkpoint(local, "train", {**state(step), "big": torch.zeros(400)}, {"at": {"step": step}})
    data = local.get(f"{folder}/tensors.safetensors")
    if damage.startswith("truncate"):
        local.put(f"{folder}/tensors.safetensors", data[: -int(damage.split()[1])])
    elif damage == "flip":
        local.put(f"{folder}/tensors.safetensors", data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif damage == "no tensors":
        local.delete(f"{folder}/tensors.safetensors")
    elif damage == "no index":
        local.delete(f"{folder}/index.json")
    else:
        key = f"{folder}/{'index' if 'index' in damage else 'at'}.json"
        local.put(key, local.get(key)[:-4])
    assert load_checkpoint(local, "train")[1] == {"at": {"step": 1}}
    save_checkpoint(local, "train", state(3), {"at": {"step": 3}})
    assert load_checkpoint(local, "train")[1] == {"at": {"step": 3}}


def test_a_torn_pointer_leads_to_the_newest_intact_one(local):
    for step in (1, 2):
        save_checkpoint(local, "train", state(step), {"at": {"step": step}})
    local.put("train/last.json", local.get("train/last.json")[:-9])
    assert load_checkpoint(local, "train")[1] == {"at": {"step": 2}}


def test_a_crash_before_the_pointer_keeps_the_previous_one(local, monkeypatch):
    save_checkpoint(local, "train", state(1), {"at": {"step": 1}})
    put = ObjectStore.put

    def crash(self, key, data):
        if key.endswith("last.json"):
            raise RuntimeError("killed")
        put(self, key, data)

    monkeypatch.setattr(ObjectStore, "put", crash)
    with pytest.raises(RuntimeError):
        save_checkpoint(local, "train", state(2), {"at": {"step": 2}})
    monkeypatch.undo()
    assert load_checkpoint(local, "train")[1] == {"at": {"step": 1}}


def test_what_is_missing_is_said(local):
    with pytest.raises(StorageError, match="no intact 'last' checkpoint"):
        load_checkpoint(local, "train")
    folder = save_checkpoint(local, "train", state(1), {})
    with pytest.raises(StorageError, match="no intact 'best' checkpoint"):
        load_checkpoint(local, "train", "best")
    local.delete(f"{folder}/tensors.safetensors")
    with pytest.raises(StorageError, match=r"no intact 'last'.*tensors"):
        load_checkpoint(local, "train")
    with pytest.raises(StorageError, match="lower case identifiers"):
        save_checkpoint(local, "train", {}, {"../x": {}})


def drafter() -> DrafterFiles:
    return DrafterFiles(state(1), {"algorithm": "dspark", "head_rank": 8}, contract(), DraftLayout("dspark", 7, 5))


def test_a_drafter_folder_comes_back(store):
    save_drafter(store, drafter())
    assert store.list() == ["config.json", "contract.json", "model.safetensors"]
    got = load_drafter(store)
    assert equal(got.tensors, drafter().tensors)
    assert (got.config, got.contract, got.layout) == (drafter().config, drafter().contract, drafter().layout)


def test_a_damaged_drafter_folder_is_refused(local):
    with pytest.raises(StorageError, match=r"not a drafter checkpoint: it has no contract\.json"):
        load_drafter(local)
    save_drafter(local, drafter())
    weights, record = local.get("model.safetensors"), local.get("contract.json")
    for cut in (1, 8, 100):
        local.put("model.safetensors", weights[:-cut])
        with pytest.raises(StorageError, match="torn or was replaced"):
            load_drafter(local)
    local.put("model.safetensors", weights)
    local.put(
        "contract.json",
        json.dumps({**json.loads(record), "layout": {"block_layout": "other", "block_length": 7, "mask_token_id": 5}}).encode(),
    )
    with pytest.raises(StorageError, match="block_layout has the value 'other'"):
        load_drafter(local)
    local.put("contract.json", record[:-20])
    with pytest.raises(StorageError, match="not readable JSON"):
        load_drafter(local)
