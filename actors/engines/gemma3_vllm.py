"""Gemma 3 for vLLM with the hidden states of chosen layers: vLLM's own class lacks the interface that `extract_hidden_states` asks for."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.interfaces import SupportsEagle3

ARCHITECTURE = "Gemma3ForCausalLM"


class Gemma3WithStates(Gemma3ForCausalLM, SupportsEagle3):
    """vLLM's model, run layer by layer in eager mode on one pipeline stage, giving the residual stream after the layers asked for."""

    wanted: frozenset[int] = frozenset()

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Choose what `forward` returns: k is the residual stream after k layers, 0 the scaled embedding."""
        self.wanted = frozenset(layers)

    def forward(
        self,
        input_ids: Any,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Returns (final normed hidden states [N, H] of N tokens, list of one [N, H] for each wanted id, ascending)."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual: Tensor | None = None
        # A copy: fused kernels may add to the residual in place, and the first residual is the embedding itself.
        states = [hidden.clone()] if 0 in self.wanted else []
        for done, layer in enumerate(self.model.layers, start=1):
            # vLLM leaves each layer's last addition to the next layer's norm.
            hidden, residual = layer(positions, hidden, residual, **options)
            if done in self.wanted:
                states.append(hidden + residual)
        normed, _ = self.model.norm(hidden, residual)
        return normed, states


def register() -> None:
    """Let vLLM build Gemma 3 text models from the class above, unless its own has learnt the interface."""
    if SupportsEagle3 not in Gemma3ForCausalLM.__mro__:
        ModelRegistry.register_model(ARCHITECTURE, Gemma3WithStates)
