"""The target's own last decoder layers: where a parallel drafter's layers may start, instead of at random."""

from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.backbone import DraftLayer
from drafters.drafter import Drafter
from drafters.errors import DrafterError
from drafters.norm import RMSNorm
from storage.target_files import load_layer_weights, read_model_config


def start_layers(drafter: Drafter, model: str) -> None:
    """Give the drafter's n layers the weights of the target's last n, in order. Fusion and norms around them stay as they are.

    Raises:
        DrafterError: the target's layers have other parts or shapes than the drafter's, all of them named; nothing is copied then.
    """
    layers = list(drafter.backbone.layers)
    last = int(read_model_config(Path(model))["num_hidden_layers"])
    found = [load_layer_weights(Path(model), index) for index in range(last - len(layers), last)]
    problems = [problem for layer, tensors in zip(layers, found, strict=True) for problem in _misfits(layer, tensors)]
    if problems:
        raise DrafterError(f"this drafter cannot start from the target's layers: {'; '.join(dict.fromkeys(problems))}. Start it at random")
    for layer, tensors in zip(layers, found, strict=True):
        _copy(layer, tensors, drafter.target_head.family.norm_plus_one)


def _misfits(layer: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    if not isinstance(layer, DraftLayer):
        return ["a chain's layer reads other inputs than the target's"]
    own = dict(layer.named_parameters())
    found = [f"the target has {name}, the drafter does not" for name in sorted(tensors.keys() - own.keys())]
    found += [f"the drafter has {name}, the target does not" for name in sorted(own.keys() - tensors.keys())]
    return found + [
        f"{name} is {list(tensors[name].shape)} in the target, {list(own[name].shape)} in the drafter"
        for name in sorted(own.keys() & tensors.keys())
        if own[name].shape != tensors[name].shape
    ]


@torch.no_grad()
def _copy(layer: nn.Module, tensors: dict[str, Tensor], norm_plus_one: bool) -> None:
    norms = {f"{name}.weight" for name, module in layer.named_modules() if isinstance(module, RMSNorm)}
    for name, parameter in layer.named_parameters():
        # A Gemma target multiplies by 1 + w, the drafter's norms by w.
        parameter.copy_(tensors[name] + 1 if norm_plus_one and name in norms else tensors[name])
