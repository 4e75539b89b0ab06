"""Checkpoints in DeepSpec's format: their `config.json` and tensor names, read as this project's.

Known are the architectures Qwen3DSparkModel and Gemma4DSparkModel (DFlash too: markov_rank 0 and no confidence head), Qwen3Eagle3Model
and Gemma4Eagle3Model. Such a checkpoint brings copies of the target's embedding and LM head, which are handed out beside the drafter's own
tensors, so that they can be compared with the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafters.config import DrafterConfig, rope_parameters
from drafters.errors import DrafterError

_BLOCK_NAMES = (
    (r"hidden_norm\.", "backbone.context_norm."),
    (r"(fc|norm|layers)\.", r"backbone.\1."),
    (r"markov_head\.markov_w1\.", "head.W1."),
    (r"markov_head\.markov_w2\.weight", "head.W2"),
    (r"markov_head\.gate_proj\.", "head.gate."),
    (r"markov_head\.joint_proj\.", "head.joint."),
    (r"confidence_head\.", "confidence."),
)
_CHAIN_NAMES = (
    (r"layers\.0\.input_layernorm\.", "backbone.embed_norm."),
    (r"layers\.0\.hidden_norm\.", "backbone.hidden_norm."),
    (r"(fc|norm|layers)\.", r"backbone.\1."),
)
_ARCHITECTURES = {
    "Qwen3DSparkModel": _BLOCK_NAMES,
    "Gemma4DSparkModel": _BLOCK_NAMES,
    "Qwen3Eagle3Model": _CHAIN_NAMES,
    "Gemma4Eagle3Model": _CHAIN_NAMES,
}
_HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}


@dataclass(frozen=True)
class Released:
    """A checkpoint as this project's drafter.

    Attributes:
        state: trainable tensors, by the names of `Drafter.trainable_state`.
        layer_ids: captured decoder layers of the target, 0-based, -1 the embedding output.
        embedding, lm_head: [V, H] the target's, None where the checkpoint leaves them out.
    """

    config: DrafterConfig
    state: dict[str, Tensor]
    layer_ids: tuple[int, ...]
    embedding: Tensor | None
    lm_head: Tensor | None


def is_deepspec(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json names one of the known architectures."""
    return _architecture(config) in _ARCHITECTURES


def from_deepspec(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Released:
    """Understand a checkpoint by its config.json and its tensors by name.

    Raises:
        DrafterError: an unknown architecture, a setting that this project does not compute, or a missing key, all of them named.
    """
    architecture = _architecture(config)
    if architecture not in _ARCHITECTURES:
        raise DrafterError(f"architecture {architecture!r} is not known; known are {', '.join(_ARCHITECTURES)}")
    options = _Options(config)
    gemma = architecture.startswith("Gemma4")
    values = {**_shape(options), **(_gemma4(options) if gemma else _qwen3(options)), **_algorithm(options, architecture)}
    layer_ids = tuple(int(layer) for layer in options.take("target_layer_ids", ()))
    values["captured_layers"] = len(layer_ids)
    options.require()
    own = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    state = {_renamed(name, _ARCHITECTURES[architecture]): tensor for name, tensor in own.items()}
    if "head.W2" in state:
        state["head.W2"] = state["head.W2"].T  # stored as a Linear's weight, [V, r]
    return Released(DrafterConfig.from_dict(values), state, layer_ids, tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight"))


class _Options:
    """The keys of a config.json, with what is missing or not supported gathered for one message."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def take(self, name: str, otherwise: Any) -> Any:
        """A key that must be there; `otherwise` lets the search for mistakes go on without it."""
        if self.config.get(name) is None:
            self.problems.append(f"lacks {name}")
            return otherwise
        return self.config[name]

    def refuse(self, found: bool, what: str) -> None:
        if found:
            self.problems.append(what)

    def require(self) -> None:
        if self.problems:
            raise DrafterError(f"this checkpoint's config.json cannot be used: {'; '.join(self.problems)}")


def _architecture(config: Mapping[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or []), None))


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, ours in rules:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", ours, name)
    return name  # the drafter will say that it does not know it


def _shape(options: _Options) -> dict[str, Any]:
    options.refuse(bool(options.config.get("attention_bias")), "attention_bias is set, this project's drafters have none")
    layers = options.take("num_hidden_layers", 1)
    kinds = set(options.config.get("layer_types") or ["full_attention"])
    options.refuse(kinds != {"full_attention"}, f"layer_types holds {', '.join(sorted(kinds))}, only full_attention is known")
    return {
        "hidden_size": options.take("hidden_size", 1),
        "intermediate_size": options.take("intermediate_size", 1),
        "num_layers": layers,
        "num_heads": options.take("num_attention_heads", 1),
        "rms_norm_eps": options.take("rms_norm_eps", 1.0),
        "vocab_size": options.take("vocab_size", 1),
        "qk_norm": True,
        "window": None,
    }


def _qwen3(options: _Options) -> dict[str, Any]:
    rope = rope_parameters(options.config)
    kind = rope.get("rope_type", "default")
    options.refuse(kind != "default" or bool(options.config.get("rope_scaling")), f"rotary positions are scaled ({kind})")
    heads = options.config.get("num_attention_heads") or 1
    activation = options.config.get("hidden_act", "silu")
    options.refuse(activation != "silu", f"hidden_act is {activation}")
    return {
        "num_kv_heads": options.config.get("num_key_value_heads") or heads,
        "head_dim": options.config.get("head_dim") or options.config.get("hidden_size", 0) // heads,
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "activation": "silu",
    }


def _gemma4(options: _Options) -> dict[str, Any]:
    """The drafter's layers are Gemma 4's global ones: their own head size and key heads, and rotary positions of a part of each head."""
    rope = rope_parameters(options.config)
    kind = rope.get("rope_type", "default")
    options.refuse(kind not in ("default", "proportional"), f"rotary positions are of type {kind}")
    options.refuse(float(rope.get("factor", 1.0)) != 1.0, "rotary positions are scaled")
    options.refuse(bool(options.config.get("enable_moe_block")), "mixture-of-experts layers are not supported")
    options.refuse(bool(options.config.get("hidden_size_per_layer_input")), "per-layer inputs are not supported")
    shared = bool(options.take("attention_k_eq_v", False))
    return {
        "num_kv_heads": options.take("num_global_key_value_heads" if shared else "num_key_value_heads", 1),
        "head_dim": options.take("global_head_dim", 2),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "rotary_share": float(rope.get("partial_rotary_factor", 1.0)) if kind == "proportional" else 1.0,
        "activation": "gelu_tanh",
        "layer_style": "gemma4",
        "shared_key_value": shared,
    }


def _algorithm(options: _Options, architecture: str) -> dict[str, Any]:
    if architecture.endswith("Eagle3Model"):
        return {
            "algorithm": "eagle3",
            "layout": "chain",
            "block_length": options.take("ttt_length", 1),
            "mask_token_id": 0,  # a chain has no masked slots
            "head": "none",
            "head_rank": 0,
            "confidence": False,
            "confidence_markov": False,
        }
    rank = int(options.take("markov_rank", 0))
    confidence = bool(options.config.get("enable_confidence_head"))
    kind = str(options.take("markov_head_type", "vanilla")).lower() if rank else "none"
    options.refuse(rank > 0 and kind not in _HEADS, f"markov_head_type {kind!r} is not known")
    return {
        "algorithm": "dspark" if rank or confidence else "dflash",
        "layout": "dspark",
        "block_length": options.take("block_size", 1),
        "mask_token_id": options.take("mask_token_id", 0),
        "head": _HEADS.get(kind, "none"),
        "head_rank": rank,
        "confidence": confidence,
        "confidence_markov": confidence and bool(options.take("confidence_head_with_markov", False)),
    }
