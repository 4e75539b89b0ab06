"""However the work is divided, the gradient is that of one rank with the whole batch: DDP and FSDP2, accumulation, recomputation."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from test_trainer import LAYER_IDS, Make, Recording, close, random_cache, recipe_maker, tiny_target, trained, with_one_thread, write_cache  # noqa: F401  # fixtures
from tiny_models import VOCABULARY

from actors import checkpointing
from actors.parallel import whole
from actors.totals import Totals
from actors.train_recipe import DecodeSettings, TrainRecipe
from drafters.config import config_from_target
from drafters.losses import default_loss_weights
from storage.object_store import ObjectStore, StorageSettings
from storage.order import rank_slots
from storage.target_files import read_model_config

# A step of six samples: three ranks' worth of shares and micro-batches, rows without any anchor among them.
STEP = {"steps": 1, "global_batch": 6, "compute": "float64", "clip": 1e9, "heldout_rows": 1, "weight_decay": 0.0}
SHORT = (1, 2, 5, 8)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return write_cache(ObjectStore(StorageSettings(str(tmp_path_factory.mktemp("sparse")))), short=SHORT)


def gradients(recipe: TrainRecipe, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Of the first step, summed up over all ranks."""
    worker = Recording(recipe, rank, world)
    with worker._reader(worker.training) as reader:
        share = list(reader.stream(worker._positions(0)))
    assert len(share) == len(rank_slots(np.arange(6), rank, world))
    worker._optimize(worker.packing.split(share, recipe.settings.micro_batch, 0), Totals())
    return {name: whole(parameter.grad).clone() for name, parameter in worker.optimizer.parameters.items()}


def in_ranks(rank: int, world: int, recipes: Sequence[TrainRecipe], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    for recipe in recipes:
        found = gradients(recipe, rank, world)
        if rank == 0:
            save_file(found, folder / f"{os.path.basename(recipe.run.settings.root)}.safetensors")  # noqa: PTH119
        dist.barrier()
    dist.destroy_process_group()


def kinds(recipe: TrainRecipe, model: Path) -> dict[str, TrainRecipe]:
    """The recipe's drafter with two layers, and a chain."""
    shape = read_model_config(model)
    eagle = config_from_target(
        shape, len(LAYER_IDS), mask_token_id=VOCABULARY - 1, num_layers=1, block_length=3, head="none", algorithm="eagle3", layout="chain",
        head_rank=0, confidence=False, confidence_markov=False,
    )  # fmt: skip
    weights = default_loss_weights(eagle)
    return {
        "dspark": replace(recipe, drafter=replace(recipe.drafter, num_layers=2)),
        "eagle3": replace(recipe, drafter=eagle, settings=replace(recipe.settings, weights=weights)),
    }


def test_ranks_and_accumulation_give_the_gradient_of_one_rank(
    make: Make,
    sparse: ObjectStore,
    model: Path,
    tmp_path: Path,
) -> None:
    expected, divided = {}, {}
    for kind, recipe in kinds(make("whole", cache=sparse, micro_batch=6, **STEP), model).items():
        expected[kind] = gradients(recipe, 0, 1)
        assert all(bool(value.abs().sum() > 0) for value in expected[kind].values())
        for parallel in ("ddp", "fsdp"):
            for micro_batch, recompute in ((3, False), (1, True)):
                settings = replace(recipe.settings, parallel=parallel, micro_batch=micro_batch, activation_checkpointing=recompute)
                run = ObjectStore(StorageSettings(str(tmp_path / f"{kind} {parallel} {micro_batch}")))
                divided[f"{kind} {parallel} {micro_batch}"] = replace(recipe, run=run, settings=settings)
    mp.spawn(in_ranks, (2, list(divided.values()), tmp_path), nprocs=2)
    for name in divided:
        found = load_file(tmp_path / f"{name}.safetensors")
        for weight, value in expected[name.split()[0]].items():
            torch.testing.assert_close(found[weight], value, rtol=1e-10, atol=1e-10 * float(value.abs().max()), msg=f"{name}: {weight}")


def test_slices_are_saved_whole_and_resumed_by_another_number_of_workers(make: Make, tmp_path: Path) -> None:
    decode = DecodeSettings(prompts=3, max_new_tokens=12, temperature=1.0, batch_size=2)
    changes = {"global_batch": 4, "micro_batch": 2, "score_every": 2, "ema": 0.9, "heldout_rows": 3, "decode": decode}
    alone, sliced = make("alone", **changes), make("sliced", parallel="fsdp", **changes)
    mp.spawn(run_rank_until, (2, sliced, tmp_path, 3), nprocs=2)
    assert checkpointing.standing_of(sliced.run).step == 3
    ours = trained(sliced)
    close(ours, trained(alone))
    assert checkpointing.standing_of(sliced.run) == checkpointing.standing_of(alone.run), "decoded alike, by two and by one"
    assert any(name.startswith("ema/") for name in ours)


class Until(Recording):
    last = 0

    def _stop_asked(self) -> bool:
        return self.rank == 0 and self.step == self.last - 1


def run_rank_until(rank: int, world: int, recipe: TrainRecipe, folder: Path, last: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    worker = Until(recipe, rank, world)
    worker.last = last
    worker.run()
    assert worker.step == last
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_recomputed_activations_change_nothing(make: Make, model: Path, kind: str) -> None:
    plain = kinds(make("plain", steps=2), model)[kind]
    recomputed = kinds(make("recomputed", steps=2, activation_checkpointing=True), model)[kind]
    expected = trained(plain)
    for name, value in trained(recomputed).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_compiled_parts_change_nothing_but_rounding(make: Make) -> None:
    close(trained(make("compiled", steps=2, compile="true")), trained(make("plain", steps=2)))
