"""A drafter over the frozen head of a target on this machine."""

from pathlib import Path

import torch

from drafters.config import DrafterConfig
from drafters.drafter import Drafter
from drafters.family import family_of
from drafters.target_head import TargetHead
from storage.target_files import load_head_weights, read_model_config


def build_drafter(model: str, config: DrafterConfig, compute: str) -> Drafter:
    """A drafter over the frozen head of the target in folder `model`."""
    weights = load_head_weights(Path(model))
    model_config = read_model_config(Path(model))
    head = TargetHead(
        config.vocab_size, config.hidden_size, float(model_config["rms_norm_eps"]), family_of(model_config), getattr(torch, compute)
    )
    head.load(weights.embedding, weights.final_norm, weights.lm_head)
    return Drafter(config, head)
