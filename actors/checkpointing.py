"""What a run keeps, and where it stands: everything from which it goes on as if nothing had happened.

Nothing else decides what comes next. The reading order and the anchors follow from seed and step, the learning rate from the step, and the
process's random numbers are seeded anew at every step.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from actors.train_recipe import CHECKPOINTS, TrainSettings
from storage.checkpoint import checkpoint_documents, has_checkpoint, load_checkpoint, save_checkpoint
from storage.object_store import ObjectStore


@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        best_step, best_tau: the best scoring so far, by tau_teacher_forced or tau on the held-out rows; 0 and None before the first.
        unimproved: scorings since then.
    """

    step: int = 0
    best_step: int = 0
    best_tau: float | None = None
    unimproved: int = 0

    def scored(self, tau: float | None) -> "Standing":
        """After a scoring at this step; None where the held-out rows hold no whole block to score."""
        if tau is None:
            return self
        if self.best_tau is None or tau > self.best_tau:
            return replace(self, best_step=self.step, best_tau=tau, unimproved=0)
        return replace(self, unimproved=self.unimproved + 1)

    def finished(self, settings: TrainSettings) -> bool:
        """All steps are taken, or the patience for a better score is at its end."""
        return self.step >= settings.steps or (settings.patience is not None and self.unimproved >= settings.patience)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, read."""

    tensors: dict[str, Tensor]
    standing: Standing

    @property
    def weights(self) -> dict[str, Tensor]:
        return _named(self.tensors, "drafter/")

    @property
    def exported(self) -> dict[str, Tensor]:
        """The weights to decode with: the average where one was kept."""
        return _named(self.tensors, "ema/") or self.weights


def save(
    run: ObjectStore, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], standing: Standing, manifest: str, keep: int
) -> None:
    """Write the run's checkpoint, atomically. It is the `best` as well where the scoring at this step is."""
    tensors = {f"drafter/{name}": tensor for name, tensor in weights.items()} | dict(optimizer)
    state = {**asdict(standing), "manifest": manifest}
    # `best` first: whoever is killed in between takes the steps since `last` again, and finds the same.
    which = ("best", "last") if standing.best_step == standing.step else ("last",)
    save_checkpoint(run, CHECKPOINTS, tensors, {"state": state}, which, keep)


def load(run: ObjectStore, which: str = "last") -> Saved | None:
    """The run's last or best intact checkpoint; None where it has none yet."""
    if not has_checkpoint(run, CHECKPOINTS, which):
        return None
    tensors, files = load_checkpoint(run, CHECKPOINTS, which)
    return Saved(tensors, _standing(files))


def standing_of(run: ObjectStore) -> Standing:
    """Where the run stands, without reading its tensors."""
    return _standing(checkpoint_documents(run, CHECKPOINTS)) if has_checkpoint(run, CHECKPOINTS) else Standing()


def _standing(files: Mapping[str, Any]) -> Standing:
    return Standing(**{name: value for name, value in files["state"].items() if name != "manifest"})


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
