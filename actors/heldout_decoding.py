"""Held-out prompts decoded while training: how many tokens a round really commits, drafting for the target itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.train_recipe import DecodeSettings, TrainRecipe
from corpus.template import ChatTemplate
from decoding.loop import speculative_decode
from decoding.metrics import acceptance_metrics
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget
from drafters.drafter import Drafter, Metrics
from drafters.target_head import TargetHead
from storage.sample import Sample


class HeldoutDecoding:
    """The whole target and a drafter of its own: the one that is trained may be cut in slices, compiled, or recompute its activations."""

    def __init__(self, recipe: TrainRecipe, settings: DecodeSettings, head: TargetHead, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=getattr(torch, recipe.settings.compute))
        self.target = TransformersTarget.for_drafter(loaded.to(device), recipe.layer_ids, recipe.drafter)
        self.drafter = Drafter(recipe.drafter, head).to(device).eval()
        stop_ids = ChatTemplate(Path(recipe.model)).stop_ids
        self.sampling = SamplingSettings(settings.temperature, settings.max_new_tokens, stop_ids, recipe.settings.seed)
        self.settings = settings

    def metrics(self, weights: Mapping[str, Tensor], prompts: Mapping[int, Tensor]) -> Metrics:
        """Acceptance metrics (`decoding.metrics`) of a drafter with these weights; a prompt's number keys its random draws."""
        self.drafter.load_trainable(dict(weights))
        asked = {number: prompt.tolist() for number, prompt in prompts.items() if len(prompt)}
        made = speculative_decode(self.target, self.drafter, list(asked.values()), self.sampling, list(asked), self.settings.batch_size)
        return {name: (torch.tensor(pair[0]), torch.tensor(pair[1])) for name, pair in acceptance_metrics(made).items()}


def prompt_of(sample: Sample) -> Tensor:
    """[n] the tokens before the first supervised one: what the target answered."""
    return torch.from_numpy(sample.input_ids[: sample.spans[0][0]])
