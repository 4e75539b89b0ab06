"""Drafters from their files, over the frozen head of a target on this machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.errors import ActorError
from drafters.config import DrafterConfig
from drafters.drafter import Drafter
from drafters.family import family_of
from drafters.released import from_deepspec, is_deepspec
from drafters.target_head import TargetHead
from storage.checkpoint import load_drafter, load_weights
from storage.contract import Contract
from storage.object_store import ObjectStore
from storage.target_files import load_head_weights, read_model_config


@dataclass(frozen=True)
class OpenedDrafter:
    """A drafter's files, read and understood.

    Attributes:
        tensors: by the names of `Drafter.trainable_state`.
        layer_ids: captured decoder layers of the target, 0-based.
        contract: what it was trained on; None for a checkpoint in another project's format, which does not say.
        embedding, lm_head: the target's as such a checkpoint brings them, to be compared with the target at hand.
    """

    config: DrafterConfig
    tensors: dict[str, Tensor]
    layer_ids: tuple[int, ...]
    contract: Contract | None = None
    embedding: Tensor | None = None
    lm_head: Tensor | None = None


def open_drafter(store: ObjectStore) -> OpenedDrafter:
    """Read a drafter that `train` left, or a checkpoint in DeepSpec's format.

    Raises:
        ActorError: the folder holds neither.
        StorageError, DrafterError: a file is missing or damaged, or describes a drafter that is not known here.
    """
    if store.exists("contract.json"):
        files = load_drafter(store)
        return OpenedDrafter(DrafterConfig.from_dict(files.config), files.tensors, files.contract.capture.layer_ids, files.contract)
    released = from_deepspec(_deepspec_config(store), load_weights(store))
    return OpenedDrafter(released.config, released.state, released.layer_ids, embedding=released.embedding, lm_head=released.lm_head)


def drafter_config(store: ObjectStore) -> DrafterConfig:
    """The architecture alone of a drafter that `open_drafter` reads; raises what that does."""
    if store.exists("contract.json"):
        return DrafterConfig.from_dict(json.loads(store.get("config.json")))
    return from_deepspec(_deepspec_config(store), {}).config


def _deepspec_config(store: ObjectStore) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(store.get("config.json")) if store.exists("config.json") else {}
    if not is_deepspec(config):
        raise ActorError(
            f"{store.settings.root} is no drafter: it has neither the contract.json that `train` writes nor a config.json that names one "
            "of DeepSpec's architectures."
        )
    return config


def build_drafter(model: str, config: DrafterConfig, compute: str, head: TargetHead | None = None) -> Drafter:
    """A drafter over the frozen head of the target in folder `model`; `head` spares reading it again."""
    return Drafter(config, head or load_target_head(model, compute))


def load_target_head(model: str, compute: str) -> TargetHead:
    """The frozen head of the target in folder `model`, computing in the dtype of that name."""
    weights = load_head_weights(Path(model))
    rows, hidden = weights.embedding.shape
    head = _empty_head(model, rows, hidden, compute)
    return head.load(weights.embedding, weights.final_norm, weights.lm_head)


def drafter_shapes(model: str, config: DrafterConfig) -> dict[str, torch.Size]:
    """Shapes of the trainable weights by name, worked out without any memory for them.

    Raises:
        DrafterError: sizes that do not go together.
    """
    with torch.device("meta"):
        head = _empty_head(model, config.vocab_size, config.hidden_size, "float32")
        embedding = torch.empty(config.vocab_size, config.hidden_size)
        head.load(embedding, torch.empty(config.hidden_size), embedding)
        return {name: parameter.shape for name, parameter in Drafter(config, head).named_parameters()}


def _empty_head(model: str, rows: int, hidden: int, compute: str) -> TargetHead:
    config = read_model_config(Path(model))
    return TargetHead(rows, hidden, float(config["rms_norm_eps"]), family_of(config), getattr(torch, compute))
