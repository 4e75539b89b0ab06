"""The transformers engine: slower than vLLM, runs everywhere, and the reference that vLLM's states are compared with."""

from collections.abc import Sequence
from typing import Any

import torch

from actors.engines.base import Captured, EngineSettings


class HfEngine:
    """One row a forward pass, so that a row's states cannot depend on its neighbours."""

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import AutoModelForCausalLM

        self.layer_ids = settings.layer_ids
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
        self.model = model.to(self.device).eval()
        self._last: torch.Tensor | None = None
        # The states before the final norm are what enters it: `hidden_states[-1]` of transformers is already normed.
        self.model.get_decoder().norm.register_forward_pre_hook(self._keep_last)

    def _keep_last(self, _module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self._last = arguments[0]

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        return [self._one(row) for row in rows]

    def _one(self, row: Sequence[int]) -> Captured:
        ids = torch.tensor([list(row)], device=self.device)
        states = self.model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        assert self._last is not None  # the hook ran: every decoder calls its norm
        context = torch.stack([states[layer + 1][0] for layer in self.layer_ids])
        return Captured(context=context.cpu(), last_hidden=self._last[0].cpu())
