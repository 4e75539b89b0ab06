"""Recomputed rows: what the engine gives again passes, states of other tokens do not, whatever their checksums say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import write_tiny_model

from actors.engines.base import EngineSettings
from actors.engines.hf import HfEngine
from actors.recheck import TOLERANCE, Rechecker, RecheckRecipe, recheck_problems
from actors.rows import make_sample
from corpus.answers import AnsweredRow
from storage.contract import Capture, Contract
from storage.object_store import ObjectStore, StorageSettings
from storage.sample import Sample
from storage.shard import Entry, ShardWriter, encode_sample
from storage.target_files import target_identity

LAYER_IDS = (0, 3, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("recheck"), "llama", tied=False)


def stored(model: Path, folder: Path, codec: str, swap: bool) -> tuple[RecheckRecipe, list[tuple[str, Entry]]]:
    """Six rows as a producer stores them; with `swap` rows 2 and 3 hold each other's states."""
    engine = EngineSettings(str(model), LAYER_IDS, engine="hf", dtype="float32", max_length=64)
    contract = Contract(target_identity(model, "tiny"), Capture(LAYER_IDS, 64, codec))
    store = ObjectStore(StorageSettings(str(folder)))
    samples: list[Sample] = []
    for seed in range(6):
        ids = np.random.default_rng(seed).integers(10, 300, 40).tolist()
        (states,) = HfEngine(engine).prefill([ids])
        samples.append(make_sample(AnsweredRow(f"row{seed}", 0, "test", "chat", ids[:8], ids[8:], "stop").masked(), states, contract))
    if swap:
        two, three = samples[2:4]
        samples[2] = replace(two, context=three.context, last_hidden=three.last_hidden)
        samples[3] = replace(three, context=two.context, last_hidden=two.last_hidden)
    with ShardWriter(store, contract) as writer:
        for index, sample in enumerate(samples):
            writer.add(encode_sample(sample, contract), sample.row_id, index)
        rows = [(shard.name, entry) for shard in writer.close() for entry in shard.entries]
    return RecheckRecipe(store, contract, engine, cpus=1, gpus=0), rows


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8"])
def test_rows_that_the_engine_gives_again_pass(model: Path, tmp_path: Path, codec: str) -> None:
    recipe, rows = stored(model, tmp_path, codec, swap=False)
    checks = list(Rechecker(recipe).check(rows))
    assert [check.index for check in checks] == list(range(6))
    assert all(check.predicted == 32 and check.agreeing >= 31 for check in checks)
    assert 0 < max(check.error for check in checks) < TOLERANCE[codec] / 2
    assert recheck_problems(checks, codec) == []


def test_states_of_other_tokens_are_found(model: Path, tmp_path: Path) -> None:
    recipe, rows = stored(model, tmp_path, "lossless", swap=True)
    checks = list(Rechecker(recipe).check(rows))
    problems = recheck_problems(checks, "lossless")
    assert [line.partition(":")[0] for line in problems[:-1]] == ["row row2.0 (index 2)", "row row3.0 (index 3)"]
    assert "next tokens" in problems[-1]
    assert all(check.error > 10 * TOLERANCE["lossless"] for check in checks[2:4])


def test_a_figure_that_is_no_number_is_a_problem() -> None:
    from actors.recheck import RowCheck

    assert recheck_problems([RowCheck("r", 0, float("nan"), 1, 1)], "raw")
