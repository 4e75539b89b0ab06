"""The training worker, without Ray: it learns, resumes bit for bit, and takes the same step however the work is divided."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from storage_cases import hidden_states, identity
from tiny_models import HIDDEN, LAYERS, VOCABULARY, write_tiny_model

from actors import batches
from actors.batches import to_tensors
from actors.errors import ActorError
from actors.export import export
from actors.optimization import schedule
from actors.train_recipe import CHECKPOINTS, TrainRecipe, TrainSettings
from actors.trainer import Worker
from drafters.batch import SampleTensors
from drafters.config import config_from_target
from drafters.losses import LossWeights
from storage.checkpoint import load_checkpoint, load_drafter
from storage.commits import Commit, lease_id, write_commit
from storage.contract import Capture, Contract, ensure_contract
from storage.errors import CorruptShard, StorageError
from storage.manifest import Manifest, split_manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.reader import SampleReader
from storage.sample import Sample, supervised_rows
from storage.shard import ShardWriter, encode_sample
from storage.target_files import read_model_config

LAYER_IDS, ROWS = (1, 3, 5), 12
SETTINGS = TrainSettings(
    steps=6,
    global_batch=4,
    micro_batch=2,
    anchors=6,
    learning_rate=3e-3,
    weight_decay=0.01,
    betas=(0.9, 0.95),
    warmup=0.2,
    clip=1.0,
    decay=4.0,
    weights=LossWeights(),
    head_start="random",
    compute="float32",
    seed=3,
    heldout_rows=2,
    log_every=1,
    score_every=100,
    checkpoint_every=3,
    prefetch_mib=8,
    reader_threads=2,
)


@pytest.fixture(autouse=True, name="one_thread")
def with_one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", name="model")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module", name="cache")
def random_cache(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return write_cache(ObjectStore(StorageSettings(str(tmp_path_factory.mktemp("cache")))))


def contract() -> Contract:
    target = replace(identity(HIDDEN), vocab_size=VOCABULARY, embedding_rows=VOCABULARY, num_layers=LAYERS)
    return Contract(target, Capture(layer_ids=LAYER_IDS, max_length=128, codec="raw"))


def write_cache(store: ObjectStore, short: Sequence[int] = ()) -> ObjectStore:
    """Rows of different length with random states, the last two thirds supervised (only a token, too little for an anchor, in `short`)."""
    case = contract()
    ensure_contract(store, case)
    with ShardWriter(store, case, 60_000) as writer:
        for index in range(ROWS):
            rng = np.random.default_rng(index)
            length = 18 + 2 * index
            spans = np.array([[length // 3, length // 3 + 1 if index in short else length]], np.int32)
            rows = supervised_rows(spans, length, "supervised")
            sample = Sample(
                row_id=f"row-{index}",
                input_ids=rng.integers(0, VOCABULARY - 5, length).astype(np.int32),
                spans=spans,
                context=hidden_states(rng, len(LAYER_IDS), length, HIDDEN),
                last_hidden=hidden_states(rng, len(rows), HIDDEN),
                last_rows=rows,
            )
            writer.add(encode_sample(sample, case), sample.row_id, index)
        shards = writer.close()
    assert len(shards) > 1
    write_commit(store, Commit(lease_id(0, ROWS), 1, 0, ROWS, tuple(shards)))
    Manifest.current(store).save(store)
    return store


Make = Callable[..., TrainRecipe]


@pytest.fixture(name="make")
def recipe_maker(cache: ObjectStore, model: Path, tmp_path: Path) -> Make:
    """Recipes over the module's cache; each name has a run folder of its own."""

    def recipe(name: str = "run", cache: ObjectStore = cache, **changes: Any) -> TrainRecipe:
        config = config_from_target(
            read_model_config(model),
            len(LAYER_IDS),
            mask_token_id=VOCABULARY - 1,
            num_layers=1,
            block_length=4,
            head="markov",
            head_rank=8,
        )
        return TrainRecipe(
            cache=cache,
            run=ObjectStore(StorageSettings(str(tmp_path / name))),
            contract=contract(),
            manifest_hash=Manifest.load(cache).hash,
            model=str(model),
            drafter=config,
            settings=replace(SETTINGS, **changes),
        )

    return recipe


class Recording(Worker):
    """Keeps the rows that would go to the board; stops after a checkpoint if told so."""

    stop_at = -1

    def __init__(self, recipe: TrainRecipe, rank: int = 0, world: int = 1) -> None:
        super().__init__(recipe, None, rank, world)
        self.rows: list[dict[str, float]] = []

    def _post(self, row: dict[str, float]) -> None:
        self.rows.append({"step": self.step, **row})

    def _save(self, together: bool = True) -> None:
        super()._save(together)
        if self.step == self.stop_at:
            raise KeyboardInterrupt


def trained(recipe: TrainRecipe) -> dict[str, torch.Tensor]:
    """Train on one rank; everything that the last checkpoint holds."""
    Recording(recipe).run()
    return load_checkpoint(recipe.run, CHECKPOINTS)[0]


def test_loss_falls_and_rows_are_told(make: Make) -> None:
    worker = Recording(make(steps=40, score_every=20, checkpoint_every=40))
    worker.run()
    losses = [row["loss"] for row in worker.rows if "loss" in row]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:5])
    scores = [row for row in worker.rows if "heldout/tau_teacher_forced" in row]
    assert [row["step"] for row in scores] == [20, 40]
    assert all(1 <= row["heldout/tau_teacher_forced"] <= 5 for row in scores)
    assert all(0 <= row["data_wait_share"] <= 1 and row["step_seconds"] > 0 for row in worker.rows if "loss" in row)


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(make: Make) -> None:
    whole = trained(make("whole"))
    recipe = make("broken")
    first = Recording(recipe)
    first.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again = Recording(recipe)
    again.run()
    assert again.rows[0]["step"] == 4
    resumed = load_checkpoint(recipe.run, CHECKPOINTS)[0]
    assert resumed.keys() == whole.keys()
    assert any(name.startswith("optimizer/") for name in whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_finished_run_is_left_alone(make: Make) -> None:
    recipe = make()
    trained(recipe)
    again = Recording(recipe)
    again.run()
    assert again.rows == []


def test_training_on_some_of_the_cached_layers_is_training_on_a_cache_of_these(make: Make, cache: ObjectStore, tmp_path: Path) -> None:
    layers = (1, 5)
    whole, smaller = contract(), ObjectStore(StorageSettings(str(tmp_path / "smaller")))
    cut = replace(whole, capture=replace(whole.capture, layer_ids=layers))
    ensure_contract(smaller, cut)
    manifest = Manifest.load(cache)
    planes = [LAYER_IDS.index(layer) for layer in layers]
    with SampleReader(cache, whole, manifest) as reader, ShardWriter(smaller, cut, 60_000) as writer:
        for sample in reader.stream(range(len(manifest))):
            kept = replace(sample, context=sample.context[planes])
            writer.add(encode_sample(kept, cut), sample.row_id, int(sample.row_id.removeprefix("row-")))
        shards = writer.close()
    write_commit(smaller, Commit(lease_id(0, ROWS), 1, 0, ROWS, tuple(shards)))
    Manifest.current(smaller).save(smaller)
    drafter = replace(make().drafter, captured_layers=len(layers))
    # All rows in one batch: the two caches' shards, and so their reading orders, differ.
    recipe = replace(make("some", global_batch=ROWS - 2, micro_batch=1, steps=2), drafter=drafter, layers=layers)
    alone = replace(make("alone", cache=smaller, global_batch=ROWS - 2, micro_batch=1, steps=2), contract=cut, drafter=drafter)
    ours, theirs = trained(recipe), trained(alone)
    close(ours, theirs)
    where, _ = export(recipe, print)
    assert load_drafter(where).contract == cut


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_micro_batches_do_not_change_the_step(make: Make, micro_batch: int) -> None:
    whole = trained(make("whole", steps=3, micro_batch=4))
    close(trained(make("parts", steps=3, micro_batch=micro_batch)), whole)


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # Adam divides by the gradient's own size, so first moments show the gradients and weights show their signs.
        torch.testing.assert_close(ours[name], tensor, rtol=2e-4, atol=2e-6 if "optimizer" in name else 1e-4, msg=name)


def run_rank(rank: int, world: int, recipe: TrainRecipe, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    Recording(recipe, rank, world).run()
    dist.destroy_process_group()


def test_two_ranks_take_the_same_steps_as_one(make: Make, tmp_path: Path) -> None:
    # A batch of three: the ranks have shares of different size. One held-out row: one of them has nothing to score.
    changes = {"steps": 3, "global_batch": 3, "micro_batch": 1, "heldout_rows": 1, "score_every": 3}
    alone, together = make("alone", **changes), make("together", **changes)
    mp.spawn(run_rank, (2, together, str(tmp_path / "meeting")), nprocs=2)
    close(load_checkpoint(together.run, CHECKPOINTS)[0], trained(alone))


def test_another_number_of_workers_reads_the_same_samples(make: Make) -> None:
    recipe = make()
    one = list(Recording(recipe)._positions(0))
    worker, shares = Recording(recipe), []
    worker.world = 3
    for worker.rank in range(3):
        shares.append(list(worker._positions(0)))
    assert sorted(one) == sorted(position for share in shares for position in share)
    assert {len(share) for share in shares} == {6, 12}  # of four samples a step, one rank takes two


def test_a_corrupt_sample_stops_with_shard_and_row(make: Make, tmp_path: Path) -> None:
    broken = write_cache(ObjectStore(StorageSettings(str(tmp_path / "broken"))))
    shards = sorted((tmp_path / "broken" / "shards").iterdir())
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0xFF
        shard.write_bytes(bytes(data))
    with pytest.raises(CorruptShard, match=r"row-\d+") as raised:
        Recording(make(cache=broken, steps=20)).run()
    assert any(shard.name in str(raised.value) for shard in shards)


def test_a_step_that_is_not_finite_stops_and_keeps_the_checkpoint(make: Make) -> None:
    recipe = make(learning_rate=1e30, checkpoint_every=1)
    with pytest.raises(ActorError, match=r"(gradient|loss) .*at step \d+ is not finite\. Rows: row-.*train.learning_rate"):
        Recording(recipe).run()
    tensors, files = load_checkpoint(recipe.run, CHECKPOINTS)
    assert files["state"]["step"] >= 1
    assert all(torch.isfinite(tensor).all() for name, tensor in tensors.items() if name.startswith("drafter/"))


def test_a_loss_that_is_not_finite_stops_with_the_row(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(sample: Sample, planes: Sequence[int]) -> SampleTensors:
        tensors = to_tensors(sample, planes)
        if sample.row_id == "row-7":
            tensors.context[0, 0] = math.nan
        return tensors

    monkeypatch.setattr(batches, "to_tensors", poisoned)
    worker = Recording(make(steps=20, micro_batch=1))
    assert "row-7" in ids(worker.training)
    with pytest.raises(ActorError, match=r"the loss at step \d+ is not finite\. Rows: row-7\. .*pipelines.cache --verify"):
        worker.run()


def test_schedule_rises_and_falls_to_zero() -> None:
    values = [schedule(step, 100, 0.1) for step in range(101)]
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[10] == 1.0
    assert all(a > b for a, b in pairwise(values[10:]))
    assert values[55] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0.0)
    assert schedule(0, 1, 0.0) == 1.0
    assert all(math.isfinite(schedule(step, 1, 0.5)) for step in range(2))


def test_wsd_is_stable_and_then_falls_over_its_last_share() -> None:
    values = [schedule(step, 100, 0.1, "wsd", 0.3) for step in range(101)]
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[10:71] == [1.0] * 61
    assert values[70:] == pytest.approx([1 - math.sqrt(step / 30) for step in range(31)])
    assert all(0 <= schedule(step, 3, 0.9, "wsd", 1.0) <= 1 for step in range(4))


def test_held_out_rows_do_not_depend_on_the_order_of_caching(cache: ObjectStore) -> None:
    manifest = Manifest.load(cache)
    table = manifest.table.to_pydict()
    backwards = manifest.table.set_column(1, "index", [list(reversed(table["index"]))])
    for rows in (1, 3, ROWS - 1):
        training, heldout = split_manifest(manifest, rows)
        other_training, other_heldout = split_manifest(Manifest(backwards, manifest.leases), rows)
        assert len(heldout) == rows
        assert set(ids(heldout)) == set(ids(other_heldout))
        assert set(ids(training)) == set(ids(other_training))
        assert set(ids(training)) | set(ids(heldout)) == set(table["row_id"])
    with pytest.raises(StorageError, match=re.escape(f"leaves nothing of the cache's {ROWS} samples")):
        split_manifest(manifest, ROWS)


def ids(manifest: Manifest) -> list[str]:
    return list(manifest.table["row_id"].to_pylist())
