"""What a step does to the weights: clipping, the learning rate's schedule, AdamW, and the running average of the weights."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from actors.parallel import placed_like, whole
from actors.train_recipe import TrainSettings


def schedule(step: int, steps: int, warmup: float, kind: str = "cosine", cooldown: float = 0.2) -> float:
    """Factor of the learning rate at a step, counted from 0: linear over the first `warmup` share of the steps, then

    - `cosine`: half a cosine down to zero;
    - `wsd`: one, and over the last `cooldown` share of the steps 1 - sqrt(x) down to zero (Hägele et al., arXiv 2405.18392).
    """
    rising = max(int(steps * warmup), 1)
    if step < rising:
        return (step + 1) / rising
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))
    falling = max(min(int(steps * cooldown), steps - rising), 1)
    return 1 - math.sqrt(max(step - (steps - falling), 0) / falling)


class Optimizer:
    """AdamW over a drafter's weights, all of its state in the weights' own precision (float32).

    Args:
        parameters: by name; what a checkpoint calls them.
        settings: learning rate and its schedule, clipping, average.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainSettings) -> None:
        self.parameters, self.settings = dict(parameters), settings
        self.adam = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()} if settings.ema else {}

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return float(self.adam.param_groups[0]["lr"])

    def clip(self) -> float:
        """Clip the gradients' norm over all weights; returns it as it was before."""
        return float(whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)))

    def step(self, step: int) -> None:
        """Take step number `step`, counted from 0."""
        settings = self.settings
        factor = schedule(step, settings.steps, settings.warmup, settings.schedule, settings.cooldown)
        for group in self.adam.param_groups:
            group["lr"] = settings.learning_rate * factor
        self.adam.step()
        # The first steps' weights are far from where they go: the average forgets them sooner.
        keep = min(settings.ema, (1 + step) / (10 + step))
        for name, average in self.average.items():
            average.lerp_(self.parameters[name].detach(), 1 - keep)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The weights are their average inside the block, where one is kept."""
        trained = {name: self.parameters[name].detach().clone() for name in self.average}
        self._assign(self.average)
        try:
            yield
        finally:
            self._assign(trained)

    @torch.no_grad()
    def _assign(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.parameters[name].copy_(value)

    def state(self) -> dict[str, Tensor]:
        """What to keep besides the weights: `optimizer/NAME/KEY`, and `ema/NAME` where an average is kept; sliced as the weights are."""
        entries = self.adam.state_dict()["state"]
        names = list(self.parameters)
        state = {f"optimizer/{names[index]}/{key}": value for index, values in entries.items() for key, value in values.items()}
        return state | {f"ema/{name}": value for name, value in self.average.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, as whole tensors: from any number of ranks."""
        entries: dict[int, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            prefix = f"optimizer/{name}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            entries[index] = {key: placed_like(value, parameter) if value.shape == parameter.shape else value for key, value in own.items()}
        self.adam.load_state_dict({"state": entries, "param_groups": self.adam.state_dict()["param_groups"]})
        for name, average in self.average.items():
            average.copy_(placed_like(state[f"ema/{name}"], average))
