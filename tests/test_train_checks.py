"""What is found out before any worker starts, each mistake in one line; and where a run's first weights come from."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters_cases import HEADS
from test_trainer import LAYER_IDS, Make, Recording, random_cache, recipe_maker, tiny_target, with_one_thread  # noqa: F401  # fixtures
from tiny_models import LAYERS, VOCABULARY

from actors.drafter import build_drafter, drafter_shapes
from actors.errors import ActorError
from actors.train_recipe import TARGET_LAYERS, TrainRecipe
from drafters.config import config_from_target
from drafters.errors import DrafterError
from pipelines.job import JobError
from pipelines.train_checks import check_disk, check_division, check_start
from storage.checkpoint import DrafterFiles, save_drafter
from storage.contract import DraftLayout
from storage.errors import StorageUnavailable
from storage.object_store import ObjectStore, StorageSettings
from storage.target_files import load_layer_weights, read_model_config

KINDS: list[dict[str, Any]] = [
    *({"head": head, "head_rank": 0 if head == "none" else 8} for head in HEADS),
    {"algorithm": "dflash", "layout": "zlab", "head": "none", "head_rank": 0, "confidence": False, "confidence_markov": False},
    *(
        {
            "algorithm": name,
            "layout": "chain",
            "num_layers": 1,
            "head": "none",
            "head_rank": 0,
            "confidence": False,
            "confidence_markov": False,
        }
        | extra
        for name, extra in (("eagle3", {"draft_vocabulary": (1, 5, 9)}), ("mtp1", {"block_length": 1}))
    ),
]


@pytest.mark.parametrize("options", KINDS)
def test_shapes_are_known_without_the_weights(model: Path, options: dict[str, Any]) -> None:
    config = config_from_target(read_model_config(model), len(LAYER_IDS), mask_token_id=VOCABULARY - 1, **options)
    built = build_drafter(str(model), config, "float32")
    assert drafter_shapes(str(model), config) == {name: parameter.shape for name, parameter in built.named_parameters()}


@pytest.mark.parametrize(
    ("batch", "micro", "workers", "even"),
    [
        (4, 2, 1, True),
        (4, 4, 1, True),
        (4, 3, 1, False),
        (4, 1, 3, False),
        (6, 1, 3, True),
        (6, 4, 3, True),
        (512, 1, 8, True),
        (12, 2, 4, False),
    ],
)
def test_workers_and_micro_batches_share_a_batch_evenly(make: Make, batch: int, micro: int, workers: int, even: bool) -> None:
    settings = make(global_batch=batch, micro_batch=micro).settings
    if even:
        assert check_division(settings, workers, fresh=True) is None
        return
    for changed, fresh in ((settings, True), (replace(settings, parallel="fsdp"), False)):
        with pytest.raises(JobError, match=rf"train.global_batch={batch} cannot be shared evenly by {workers} workers.*multiple of"):
            check_division(changed, workers, fresh)
    told = check_division(settings, workers, fresh=False)
    assert told is not None
    assert "some workers wait" in told, "a run that has begun goes on with the workers that there are"


def test_fewer_samples_than_workers_are_refused(make: Make) -> None:
    with pytest.raises(JobError, match=r"train\.global_batch=4 gives 5 workers less than a sample each"):
        check_division(make().settings, 5, fresh=False)


def test_checkpoints_must_fit_the_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make()
    weights = {"w": torch.Size([1 << 20])}
    for ema, copies in ((0.0, 3 * 4 + 1), (0.9, 4 * 4 + 1)):
        asked = replace(recipe, settings=replace(recipe.settings, ema=ema))
        needed = copies * 4 * 2**20
        for free in (needed, None):
            monkeypatch.setattr(ObjectStore, "free_bytes", lambda self, free=free: free)
            check_disk(asked, weights)
        monkeypatch.setattr(ObjectStore, "free_bytes", lambda self, free=needed - 1: free)
        with pytest.raises(JobError, match=r"checkpoints need 0\.\d GiB, 0\.\d are free.*train.keep_checkpoints"):
            check_disk(asked, weights)
        recipe.run.put("checkpoints/old", b"x")  # what is there already will be overwritten
        check_disk(asked, weights)
        recipe.run.delete("checkpoints/old")


def test_room_on_a_folders_disk(tmp_path: Path) -> None:
    free = ObjectStore(StorageSettings(str(tmp_path / "not" / "yet"))).free_bytes()
    assert free is not None
    assert free > 0
    assert ObjectStore(StorageSettings("memory://somewhere")).free_bytes() is None


# Where a run starts


def exported(recipe: TrainRecipe, folder: Path) -> tuple[TrainRecipe, dict[str, torch.Tensor]]:
    """A drafter of the recipe's kind with weights of its own, and the recipe that starts from it."""
    torch.manual_seed(99)
    tensors = {name: torch.randn(shape) for name, shape in drafter_shapes(recipe.model, recipe.drafter).items()}
    store = ObjectStore(StorageSettings(str(folder)))
    layout = DraftLayout(recipe.drafter.layout, recipe.drafter.block_length, recipe.drafter.mask_token_id)  # type: ignore[arg-type]
    save_drafter(store, DrafterFiles(tensors, recipe.drafter.to_dict(), recipe.contract, layout))
    return replace(recipe, start=store, settings=replace(recipe.settings, start=str(folder), head_start="target")), tensors


def test_a_run_starts_from_another_drafter_once(make: Make, tmp_path: Path) -> None:
    recipe, tensors = exported(make(), tmp_path / "drafter")
    worker = Recording(recipe)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in worker.drafter.named_parameters())
    worker.run()
    again = Recording(recipe)
    assert again.step == 6
    assert not any(torch.equal(parameter, tensors[name]) for name, parameter in again.drafter.named_parameters())


def test_a_drafter_of_another_kind_is_no_start(make: Make, model: Path, tmp_path: Path) -> None:
    recipe, _ = exported(make(), tmp_path / "drafter")

    def checked(**changes: Any) -> str | None:
        config = replace(recipe.drafter, **changes)
        return check_start(replace(recipe, drafter=config), drafter_shapes(recipe.model, config))

    assert checked() is None
    assert checked(window=7, block_length=6) is None
    with pytest.raises(JobError, match=r"another kind of drafter .*drafter.num_layers: there 1, now 2|drafter.num_layers: there 2, now 1"):
        checked(num_layers=2)
    with pytest.raises(JobError, match=r"drafter.mask_token_id"):
        checked(mask_token_id=3)
    chain = config_from_target(read_model_config(model), len(LAYER_IDS), mask_token_id=3, algorithm="eagle3", block_length=4)
    of_chain, _ = exported(replace(make("chain"), drafter=replace(chain, mask_token_id=0)), tmp_path / "chain")
    assert check_start(replace(of_chain, drafter=chain), drafter_shapes(of_chain.model, chain)) is None, "a chain has no masked slots"
    other = replace(recipe.contract, capture=replace(recipe.contract.capture, layer_ids=(0, 1, 2)))
    with pytest.raises(JobError, match=r"capture.layer_ids"):
        check_start(replace(recipe, contract=other), {})
    other = replace(recipe.contract, target=replace(recipe.contract.target, weights_fingerprint="f" * 64))
    told = check_start(replace(recipe, contract=other), {})
    assert told is not None
    assert "other weights of the target" in told
    with pytest.raises(ActorError, match="is no drafter"):
        check_start(replace(recipe, start=ObjectStore(StorageSettings(str(tmp_path / "none")))), {})


def test_a_run_starts_from_the_targets_layers(make: Make, model: Path) -> None:
    worker = Recording(make(start=TARGET_LAYERS))
    own = dict(worker.drafter.backbone.layers[0].named_parameters())
    theirs = load_layer_weights(model, LAYERS - 1)
    assert own.keys() == theirs.keys()
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in own.items())
    wider = make("wider", start=TARGET_LAYERS)
    with pytest.raises(DrafterError, match="cannot start from the target's layers"):
        Recording(replace(wider, drafter=replace(wider.drafter, qk_norm=True)))


# A store that hangs


def test_a_stalled_reader_says_what_it_waits_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()

    def hang(self: ObjectStore, *given: Any) -> bytes:
        hanging.wait(20)
        raise OSError("too late")

    worker = Recording(make(stall_minutes=0.3 / 60))
    monkeypatch.setattr(ObjectStore, "get_range", hang)
    with pytest.raises(StorageUnavailable, match=r"row row-\d+ has not come from .*shards/.* for 0 s, nor an error: the storage hangs"):
        worker.run()
    hanging.set()
