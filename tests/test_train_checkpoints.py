"""What a run keeps: the best and the newest checkpoints, its averaged weights, and everything it needs to go on after any kill."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import Make, Recording, random_cache, recipe_maker, tiny_target, trained, with_one_thread  # noqa: F401  # fixtures

from actors import checkpointing
from actors.decoder import Decoder, DecoderSettings, Prompt
from actors.errors import Stopped
from actors.train_recipe import CHECKPOINTS, DecodeSettings, TrainRecipe
from corpus.template import ChatTemplate
from decoding.settings import SamplingSettings
from pipelines.signals import stop_on_sigterm
from storage.checkpoint import DrafterFiles, load_checkpoint, save_drafter
from storage.contract import DraftLayout
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.shard import read_sample

EMA = 0.9


class Scripted(Recording):
    """Scores as written in `taus`, one a scoring."""

    taus: tuple[float, ...] = ()

    def _score(self) -> None:
        every = self.settings.score_every
        self.standing = self.standing.scored(self.taus[self.step // every - 1])


def scripted(recipe: TrainRecipe, *taus: float) -> Scripted:
    worker = Scripted(recipe)
    worker.taus = taus
    worker.run()
    return worker


def test_the_best_scoring_and_the_newest_checkpoints_stay(make: Make) -> None:
    recipe = make(steps=9, score_every=2, checkpoint_every=1, keep_checkpoints=3)
    scripted(recipe, 1.5, 1.7, 1.6, 1.7, 1.6)
    saved = checkpointing.load(recipe.run, "best")
    assert saved is not None
    assert (saved.standing.step, saved.standing.best_step, saved.standing.best_tau) == (4, 4, 1.7)
    assert checkpointing.standing_of(recipe.run) == checkpointing.Standing(9, 4, 1.7, 3)
    assert {step for step, _ in kept(recipe)} == {9, 8, 7, 4, 2}, "three newest, the best and the best before it"


def test_held_out_scores_choose_the_best(make: Make) -> None:
    recipe = make(steps=6, score_every=1, checkpoint_every=6, learning_rate=0.03)
    worker = Recording(recipe)
    worker.run()
    taus = {row["step"]: row["heldout/tau_teacher_forced"] for row in worker.rows if "heldout/tau_teacher_forced" in row}
    best = max(taus, key=lambda step: taus[step])
    saved = checkpointing.load(recipe.run, "best")
    assert saved is not None
    assert (saved.standing.step, saved.standing.best_tau) == (best, taus[best])


def test_patience_ends_a_run_that_no_longer_gains(make: Make) -> None:
    recipe = make(steps=20, score_every=2, checkpoint_every=100, patience=2)
    taus = (1.1, 1.3, 1.2, 1.25, 1.4, 1.5, 1.0, 1.0, 1.0, 1.0)
    assert scripted(recipe, *taus).step == 8
    assert checkpointing.standing_of(recipe.run).finished(recipe.settings)
    assert scripted(recipe, *taus).rows == [], "it stays ended"
    patient = replace(recipe, settings=replace(recipe.settings, patience=3))
    assert scripted(patient, *taus).step == 18
    assert checkpointing.standing_of(recipe.run).best_step == 12


def test_decoded_tau_chooses_the_best_as_evaluation_would_measure_it(make: Make, model: Path) -> None:
    decode = DecodeSettings(prompts=3, max_new_tokens=12, temperature=1.0, batch_size=2)
    changes = {"steps": 6, "score_every": 2, "checkpoint_every": 2, "learning_rate": 0.03, "heldout_rows": 4, "keep_checkpoints": 9}
    recipe = make("decoded", decode=decode, ema=0.5, **changes)
    worker = Recording(recipe)
    worker.run()
    told = {int(row["step"]): row for row in worker.rows if "heldout/tau" in row}
    assert {step: row["heldout/tau"] for step, row in told.items()} == {step: pytest.approx(naive_tau(recipe, step)) for step in (2, 4, 6)}
    assert len({row["heldout/tau"] for row in told.values()}) > 1
    assert all("heldout/tau_teacher_forced" in row and 0 <= row["heldout/accept_cond@1"] <= 1 for row in told.values())
    best = max(told, key=lambda step: told[step]["heldout/tau"])
    standing = checkpointing.standing_of(recipe.run)
    assert (standing.best_step, standing.best_tau) == (best, told[best]["heldout/tau"])
    forced = trained(make("forced", ema=0.5, **changes))
    same(load_checkpoint(recipe.run, CHECKPOINTS)[0], forced)


def naive_tau(recipe: TrainRecipe, step: int) -> float:
    """Tokens committed a round, decoded with the files of an exported drafter as `evaluate` does."""
    tensors = dict(kept(recipe))[step]
    averaged = {name.removeprefix("ema/"): tensor for name, tensor in tensors.items() if name.startswith("ema/")}
    store = recipe.run.child(f"exported-{step}")
    layout = DraftLayout("dspark", recipe.drafter.block_length, recipe.drafter.mask_token_id)
    save_drafter(store, DrafterFiles(averaged, recipe.drafter.to_dict(), recipe.contract, layout))
    manifest, prompts = Manifest.load(recipe.cache), []
    held = sorted(range(len(manifest)), key=lambda position: manifest.entry(position)[1].row_id)[:4]
    for number, position in enumerate(sorted(held)[:3]):
        sample = read_sample(recipe.cache, *manifest.entry(position), recipe.contract)
        prompts.append(Prompt(number, tuple(sample.input_ids[: len(sample.input_ids) // 3].tolist())))
    decoder = Decoder(recipe.model, {"drafter": store}, DecoderSettings(1, 1, 0, "float32", 3))
    sampling = SamplingSettings(1.0, 12, ChatTemplate(Path(recipe.model)).stop_ids, recipe.settings.seed)
    rounds = [r for generation in decoder.decode(prompts, sampling, "drafter") for r in generation.rounds]
    return sum(r.committed for r in rounds) / len(rounds)


class Killed(BaseException):
    """Like a kill, it passes every handler."""


def kill_at_write(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies at that write, counted from 0; half of those before the object is there, half right after."""
    put, count = ObjectStore.put, iter(range(10**6))

    def dying(self: ObjectStore, key: str, data: Any) -> None:
        now = next(count)
        if now == number and number % 2:
            raise Killed
        put(self, key, data)
        if now == number:
            raise Killed

    monkeypatch.setattr(ObjectStore, "put", dying)


def test_killed_at_any_write_it_ends_like_an_undisturbed_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"steps": 3, "score_every": 2, "checkpoint_every": 1, "ema": EMA, "log_every": 100, "heldout_rows": 1, "global_batch": 2}
    whole = make("whole", **changes)
    expected, scored = trained(whole), checkpointing.load(whole.run, "best")
    assert scored is not None
    number, kills = 0, 0
    while True:
        recipe = make(f"killed at {number}", **changes)
        kill_at_write(monkeypatch, number)
        try:
            Recording(recipe).run()
            break
        except Killed:
            kills, number = kills + 1, number + 1
        finally:
            monkeypatch.undo()
        same(trained(recipe), expected)
        best = checkpointing.load(recipe.run, "best")
        assert best is not None
        assert best.standing == scored.standing
        same(best.tensors, scored.tensors)
    assert kills >= 12


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_the_average_is_that_of_all_steps_and_is_what_is_scored_and_exported(make: Make) -> None:
    recipe = make(steps=5, ema=EMA, checkpoint_every=1, score_every=5, keep_checkpoints=9)
    worker = Recording(recipe)
    average = {name: parameter.detach().clone() for name, parameter in worker.drafter.named_parameters()}
    worker.run()
    tensors = dict(kept(recipe))
    for step in range(5):
        keep = min(EMA, (1 + step) / (10 + step))
        for name, value in average.items():
            value.mul_(keep).add_(tensors[step + 1][f"drafter/{name}"], alpha=1 - keep)
    saved = checkpointing.load(recipe.run)
    assert saved is not None
    for name, value in average.items():
        torch.testing.assert_close(saved.exported[name], value, rtol=1e-5, atol=1e-7)
        assert torch.equal(worker.optimizer.parameters[name], saved.weights[name]), "training went on with its own weights"
    scoring = Recording(make("scoring"))
    scoring.drafter.load_trainable(saved.exported)
    scoring._score()
    assert scoring.rows[-1]["heldout/tau_teacher_forced"] == pytest.approx(worker.rows[-1]["heldout/tau_teacher_forced"], abs=1e-6)


def kept(recipe: TrainRecipe) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """(step, tensors) of every checkpoint that is there."""
    for folder in (Path(recipe.run.settings.root) / CHECKPOINTS).iterdir():
        if (folder / "state.json").is_file():
            yield json.loads((folder / "state.json").read_text())["step"], load_file(folder / "tensors.safetensors")


def test_asked_to_stop_it_writes_a_checkpoint_and_goes_on_from_there(make: Make) -> None:
    whole = trained(make("whole", checkpoint_every=100))
    recipe = make("stopped", checkpoint_every=100)

    class Asked(Recording):
        def _stop_asked(self) -> bool:
            return self.step == 3

    Asked(recipe).run()
    assert checkpointing.standing_of(recipe.run).step == 4, "the step that it was in is taken whole"
    same(trained(recipe), whole)


def test_asked_to_stop_while_it_waits_for_the_cache(make: Make) -> None:
    recipe = make(checkpoint_every=100)

    class Waiting(Recording):
        def _stop_asked(self) -> bool:
            return self.step == 2

        def _optimize(self, *given: Any) -> tuple[float, bool]:
            return super()._optimize(*given)[0], False

    worker = Waiting(recipe)
    batches = worker.order.global_batch
    worker.order.global_batch = lambda step, size: None if step == 2 else batches(step, size)  # type: ignore[method-assign, assignment]
    worker.run()
    assert load_checkpoint(recipe.run, CHECKPOINTS)[1]["state"]["step"] == 2
    worker = Waiting(recipe)
    worker.world = 2
    worker.order.global_batch = lambda step, size: None  # type: ignore[method-assign, assignment]
    with pytest.raises(Stopped):
        worker.run()


def test_the_first_sigterm_is_a_wish_and_the_second_one_is_not() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with stop_on_sigterm() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wait(5)
            assert seen == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]
        with stop_on_sigterm() as stop:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(seen) == 2
        assert not stop.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
