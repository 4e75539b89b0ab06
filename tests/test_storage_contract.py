"""The contract: what differs is named, what is damaged is refused."""

import json
from dataclasses import fields, replace

import pytest
from storage_cases import contract, with_capture

from storage.contract import (
    CONTRACT_KEY,
    Contract,
    DraftLayout,
    differences,
    ensure_contract,
    load_contract,
    require_match,
)
from storage.errors import ContractMismatch, StorageError
from storage.object_store import ObjectStore, StorageSettings

CHANGED = {
    "id": "other",
    "config_hash": "c1",
    "weights_fingerprint": "f1",
    "revision": "main",
    "tokenizer_hash": "t1",
    "chat_template_hash": "p1",
    "vocab_size": 999,
    "embedding_rows": 1100,
    "hidden_size": 128,
    "num_layers": 9,
    "embedding_scale": 2.0,
    "logit_softcap": 30.0,
    "logit_multiplier": 0.5,
    "layer_ids": (1, 3, 4),
    "max_length": 2048,
    "codec": "fp8",
    "last_hidden_rows": "all",
    "mask_rule": "everything",
    "layer_convention": "another",
    "mask_token_id": 7,
}


@pytest.fixture
def store(tmp_path):
    return ObjectStore(StorageSettings(str(tmp_path / "cache")))


@pytest.mark.parametrize("name", CHANGED)
def test_every_field_that_differs_is_named(name):
    ours = contract()
    part = "target" if name in {field.name for field in fields(ours.target)} else "capture"
    theirs = replace(ours, **{part: replace(getattr(ours, part), **{name: CHANGED[name]})})
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == [(f"{part}.{name}", getattr(getattr(ours, part), name), CHANGED[name])]
    with pytest.raises(ContractMismatch, match=rf"{part}\.{name}.*do this") as caught:
        require_match(ours, theirs, "s3://there", "do this")
    assert repr(CHANGED[name]) in str(caught.value)
    assert Contract.from_json(theirs.to_json()) == theirs


def test_several_differences_come_in_one_message():
    theirs = with_capture(contract(), max_length=17, codec="raw")
    with pytest.raises(ContractMismatch, match=r"capture\.max_length.*17.*4096.*capture\.codec.*'raw'.*'lossless'"):
        require_match(contract(), theirs, "there", "")


def test_a_second_writer_must_find_an_equal_one(store):
    ensure_contract(store, contract())
    ensure_contract(store, contract())
    assert load_contract(store) == contract()
    with pytest.raises(ContractMismatch, match=r"capture\.max_length: .*cache has 4096, this run 8"):
        ensure_contract(store, with_capture(contract(), max_length=8))
    assert load_contract(store) == contract()


def test_an_edited_contract_is_noticed(store):
    ensure_contract(store, contract())
    text = store.get(CONTRACT_KEY)
    store.put(CONTRACT_KEY, text.replace(b'"t0"', b'"t9"'))
    with pytest.raises(ContractMismatch, match=r"target\.tokenizer_hash"):
        ensure_contract(store, contract())
    for damaged, message in (
        (text[:-5], "not readable JSON"),
        (b"[]", "must be an object"),
        (text.replace(b'"revision"', b'"revised"'), r"lacks target\.revision and has unknown target\.revised"),
        (text.replace(b'"max_length": 4096', b'"max_length": "4096"'), r"capture\.max_length has the value '4096'"),
        (text.replace(b'"before_final_norm"', b'"after_final_norm"'), r"capture\.last_hidden has the value"),
        (text.replace(b'"schema_version": 1', b'"schema_version": 2'), "schema_version is 2, this code reads 1"),
    ):
        store.put(CONTRACT_KEY, damaged)
        with pytest.raises(StorageError, match=message):
            ensure_contract(store, contract())


def test_a_contract_from_before_the_mask_token_was_kept_is_read(store):
    ours = with_capture(contract(), mask_token_id=5)
    store.put(CONTRACT_KEY, ours.to_json().replace(',\n    "mask_token_id": 5', "").encode())
    assert load_contract(store) == contract()
    with pytest.raises(ContractMismatch, match=r"capture\.mask_token_id: .*cache has None, this run 5"):
        ensure_contract(store, ours)


def test_a_missing_contract_says_how_to_get_one(store):
    with pytest.raises(StorageError, match=r"not a target cache.*make cache"):
        load_contract(store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (1, 7)}, "final layer"),
        ({"layer_ids": (3, 1)}, "ascending"),
        ({"layer_ids": ()}, "ascending"),
        ({"layer_ids": (-2, 1)}, "-1..6"),
        ({"codec": "zip"}, "raw, lossless, fp8"),
        ({"max_length": 1}, "max_length"),
        ({"last_hidden_rows": "some"}, "last_hidden_rows"),
        ({"last_hidden": "after_final_norm"}, "before_final_norm"),
        ({"mask_token_id": 1024}, "below 1024"),
    ],
)
def test_impossible_contracts_are_refused(changes, message):
    with pytest.raises(StorageError, match=message):
        with_capture(contract(), **changes)


def test_numbers_keep_their_value_through_json():
    ours = contract()
    scale = 50.59644256269407
    exact = replace(ours, target=replace(ours.target, embedding_scale=scale, logit_softcap=30.0))
    assert Contract.from_json(json.dumps(json.loads(exact.to_json()))).target.embedding_scale == scale


def test_draft_layouts_compare_alike():
    assert differences(DraftLayout("dspark", 7, 5), DraftLayout("zlab", 7, 5)) == [("block_layout", "dspark", "zlab")]
