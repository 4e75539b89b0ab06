"""A drafter's architecture as typed, validated data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafters.errors import DrafterError
from drafters.family import family_of, text_config

ALGORITHMS = ("dspark", "dflash")
LAYOUTS = ("dspark", "zlab")
HEADS = ("none", "markov", "gated", "rnn")
ACTIVATIONS = ("silu", "gelu_tanh")
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "captured_layers",
    "block_length",
)


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes a drafter's parameters and what its outputs mean.

    Attributes:
        algorithm: "dspark" (parallel backbone, optional sequential and confidence head) or "dflash" (backbone only).
        layout: "dspark": inputs are the anchor and g-1 masks, slot k predicts the token at anchor + k + 1. "zlab" (the original DFlash):
            anchor and g masks, slot 0 is untrained, slot k predicts the token at anchor + k.
        hidden_size: H, the target's, since embedding and LM head are shared.
        vocab_size: V, rows of the target's embedding (its padded size, where padded).
        captured_layers: L, how many of the target's layers feed the context.
        block_length: g, tokens drafted per block.
        head, head_rank: the sequential head and its rank r (0 with head "none").
        confidence, confidence_markov: the confidence head, and whether it sees the previous token's W1 row besides h.
        window: a slot at position q attends to context positions p with q - p < window; None: to all before the anchor.
    """

    algorithm: str
    layout: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    captured_layers: int
    block_length: int
    mask_token_id: int
    head: str
    head_rank: int
    confidence: bool
    confidence_markov: bool
    qk_norm: bool
    activation: str
    window: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    @property
    def input_slots(self) -> int:
        """Tokens fed per block: g in the dspark layout, g + 1 in zlab's."""
        return self.block_length + (1 if self.layout == "zlab" else 0)

    def validate(self) -> None:
        """Raise one DrafterError that lists every mistake in this configuration."""
        problems = self._problems()
        if problems:
            raise DrafterError("drafter configuration: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        found = []
        for name, known in (("algorithm", ALGORITHMS), ("layout", LAYOUTS), ("head", HEADS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                found.append(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name in _COUNTS:
            if not _is_count(getattr(self, name)):
                found.append(f"{name} is {getattr(self, name)!r}, expected a positive integer")
        for name in ("confidence", "confidence_markov", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name} is {getattr(self, name)!r}, expected true or false")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                found.append(f"{name} is {value!r}, expected a positive number")
        if _is_count(self.num_heads) and _is_count(self.num_kv_heads) and self.num_heads % self.num_kv_heads:
            found.append(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if _is_count(self.head_dim) and self.head_dim % 2:
            found.append(f"head_dim {self.head_dim} is odd, rotary positions need pairs")
        if not isinstance(self.mask_token_id, int) or (_is_count(self.vocab_size) and not 0 <= self.mask_token_id < self.vocab_size):
            found.append(f"mask_token_id {self.mask_token_id!r} is not an id below vocab_size {self.vocab_size}")
        if self.head == "none" and self.head_rank != 0:
            found.append(f"head 'none' has no rank, head_rank is {self.head_rank}; set it to 0 or choose a head")
        if self.head in HEADS[1:] and not _is_count(self.head_rank):
            found.append(f"head {self.head!r} needs a positive head_rank, it is {self.head_rank!r}")
        if self.confidence_markov and not self.confidence:
            found.append("confidence_markov is set without confidence")
        if self.confidence_markov and self.head == "none":
            found.append("confidence_markov needs the W1 of a sequential head, but head is 'none'")
        if self.algorithm == "dflash" and (self.head != "none" or self.confidence):
            found.append("dflash has neither sequential nor confidence head; use algorithm 'dspark', or head 'none' and confidence false")
        if self.layout == "zlab" and self.algorithm != "dflash":
            found.append("layout 'zlab' belongs to algorithm 'dflash'")
        if self.window is not None and not _is_count(self.window):
            found.append(f"window is {self.window!r}, expected a positive integer or null")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """The inverse of to_dict; unknown and missing keys are errors, all listed."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        missing = sorted(name for name, field in fields.items() if name not in values and field.default is dataclasses.MISSING)
        if unknown or missing:
            parts = [f"unknown key {name!r}" for name in unknown] + [f"missing key {name!r}" for name in missing]
            raise DrafterError("drafter configuration: " + "; ".join(parts))
        return cls(**values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def config_from_target(model_config: Mapping[str, Any], captured_layers: int, **options: Any) -> DrafterConfig:
    """A drafter's configuration for a target: sizes from the target's `config.json`, the rest from DSpark's released settings.

    Args:
        model_config: the target's Hugging Face configuration as a dictionary.
        captured_layers: L, how many layers' states the cache holds.
        options: any DrafterConfig field; `mask_token_id` is required, everything else overrides a default.

    Raises:
        DrafterError: unknown family, unknown option, missing mask token, or sizes that do not fit each other.
    """
    config = text_config(model_config)
    family = family_of(model_config)
    heads = config["num_attention_heads"]
    head = options.get("head", "none" if options.get("algorithm") == "dflash" else "markov")
    confidence = options.get("confidence", options.get("algorithm", "dspark") == "dspark")
    values: dict[str, Any] = {
        "algorithm": "dspark",
        "layout": "dspark",
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": 5,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": _rope_theta(config),
        "vocab_size": config["vocab_size"],
        "captured_layers": captured_layers,
        "block_length": 7,
        "head": head,
        "head_rank": 0 if head == "none" else 256,
        "confidence": confidence,
        "confidence_markov": bool(confidence) and head != "none",
        "qk_norm": family.qk_norm,
        "activation": "silu" if (config.get("hidden_activation") or config.get("hidden_act", "silu")) == "silu" else "gelu_tanh",
        "window": None,
    }
    return DrafterConfig.from_dict({**values, **options})


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the target's (global) rotary positions: a plain field before transformers 5, nested by layer type in Gemma."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)
