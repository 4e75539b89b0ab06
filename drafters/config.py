"""A drafter's architecture as typed, validated data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafters.errors import DrafterError
from drafters.family import family_of, text_config

LAYOUTS = ("dspark", "zlab", "chain")
HEADS = ("none", "markov", "gated", "rnn")
LAYER_STYLES = ("plain", "gemma4")
_FOREIGN = {"layer_style": "plain", "shared_key_value": False, "rotary_share": 1.0}
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
class Algorithm:
    """What sets one drafting algorithm apart from the others.

    Attributes:
        layouts: block layouts it knows, its own first.
        heads: it may have a sequential and a confidence head.
        context: which of the target's states it reads: those of the captured `layers`, or the `last_hidden` one of every position.
        layers, block: the only depth and block length it has, None where they are free.
        per_sequence: the loss is a mean over a sequence's slots, then over sequences (for Eagle3 a mean over all tokens is known to hurt).
    """

    layouts: tuple[str, ...]
    heads: bool = False
    context: str = "layers"
    layers: int | None = None
    block: int | None = None
    per_sequence: bool = False


ALGORITHMS = {
    "dspark": Algorithm(("dspark",), heads=True),
    "dflash": Algorithm(("dspark", "zlab")),
    "eagle3": Algorithm(("chain",), layers=1, per_sequence=True),
    "mtp1": Algorithm(("chain",), context="last_hidden", layers=1, block=1),
}


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes a drafter's parameters and what its outputs mean.

    Attributes:
        algorithm: "dspark" (parallel backbone, optional sequential and confidence head), "dflash" (backbone only), "eagle3" (one layer,
            slot after slot on its own hidden state) or "mtp1" (the same with one slot, on the target's last hidden states).
        layout: "dspark": inputs are the anchor and g-1 masks, slot k predicts the token at anchor + k + 1. "zlab" (the original DFlash):
            anchor and g masks, slot 0 is untrained, slot k predicts the token at anchor + k. "chain": slot k stands at anchor - 1 + k, its
            inputs are the token at anchor + k and the state before it (the target's for slot 0, then slot k-1's), it predicts the token at
            anchor + k + 1.
        hidden_size: H, the target's, since embedding and LM head are shared.
        vocab_size: V, rows of the target's embedding (its padded size, where padded).
        captured_layers: L, how many of the target's states feed the context (1 for mtp1, the last hidden one).
        block_length: g, tokens drafted per block.
        head, head_rank: the sequential head and its rank r (0 with head "none").
        confidence, confidence_markov: the confidence head, and whether it sees the previous token's W1 row besides h.
        window: a slot at position q attends to context positions p with q - p < window; None: to all before the anchor.
        draft_vocabulary: eagle3: target ids that may be drafted, ascending; None: all of them.
        layer_style: "plain" (pre-norm, as in Llama and Qwen3) or "gemma4" (norms before and after attention and feed-forward, values
            normed, attention scores not divided by the root of head_dim, a factor on each layer's output).
        shared_key_value: gemma4: values are the key projection's output, before its norm.
        rotary_share: part of each head that has rotary positions; the rest of its pairs stay as they are.
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
    draft_vocabulary: tuple[int, ...] | None = None
    layer_style: str = "plain"
    shared_key_value: bool = False
    rotary_share: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.draft_vocabulary, list):  # as JSON has it
            object.__setattr__(self, "draft_vocabulary", tuple(self.draft_vocabulary))
        self.validate()

    @property
    def input_slots(self) -> int:
        """Tokens fed per block: g in the dspark layout, g + 1 in zlab's."""
        return self.block_length + (1 if self.layout == "zlab" else 0)

    @property
    def chain(self) -> bool:
        """Slots are worked out one after the other, each from the hidden state and the token of the one before."""
        return self.layout == "chain"

    @property
    def kind(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    def validate(self) -> None:
        """Raise one DrafterError that lists every mistake in this configuration."""
        problems = self._problems()
        if problems:
            raise DrafterError("drafter configuration: " + "; ".join(problems))

    def _problems(self) -> list[str]:
        found = []
        choices = {"algorithm": ALGORITHMS, "layout": LAYOUTS, "head": HEADS, "activation": ACTIVATIONS, "layer_style": LAYER_STYLES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                found.append(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name in _COUNTS:
            if not _is_count(getattr(self, name)):
                found.append(f"{name} is {getattr(self, name)!r}, expected a positive integer")
        for name in ("confidence", "confidence_markov", "qk_norm", "shared_key_value"):
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
        if self.shared_key_value and self.layer_style != "gemma4":
            found.append("shared_key_value belongs to layer_style 'gemma4'")
        if self.layer_style == "gemma4" and not self.qk_norm:
            found.append("layer_style 'gemma4' needs qk_norm: its attention scores are not scaled otherwise")
        if isinstance(self.rotary_share, bool) or not isinstance(self.rotary_share, int | float) or not 0 < self.rotary_share <= 1:
            found.append(f"rotary_share is {self.rotary_share!r}, expected a number in (0, 1]")
        if self.algorithm in ALGORITHMS:
            found += self._algorithm_problems(ALGORITHMS[self.algorithm])
        if self.window is not None and not _is_count(self.window):
            found.append(f"window is {self.window!r}, expected a positive integer or null")
        return found

    def _algorithm_problems(self, kind: Algorithm) -> list[str]:
        found, name = [], self.algorithm
        if not kind.heads and (self.head != "none" or self.confidence):
            found.append(f"{name} has neither sequential nor confidence head; use algorithm 'dspark', or head 'none' and confidence false")
        if self.layout in LAYOUTS and self.layout not in kind.layouts:
            found.append(f"layout {self.layout!r} does not belong to {name}, which has {', '.join(kind.layouts)}")
        if kind.layers is not None and self.num_layers != kind.layers:
            found.append(f"{name} has num_layers {kind.layers}, not {self.num_layers!r}")
        if kind.block is not None and self.block_length != kind.block:
            found.append(f"{name} has block_length {kind.block}, not {self.block_length!r}")
        if kind.context == "last_hidden" and self.captured_layers != 1:
            found.append(f"{name} reads one state a position, captured_layers is {self.captured_layers!r}")
        ids = self.draft_vocabulary
        if ids is not None and name != "eagle3":
            found.append(f"a draft vocabulary belongs to eagle3, not to {name}")
        elif ids is not None and (not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.vocab_size):
            found.append(f"draft_vocabulary must be distinct ids below vocab_size {self.vocab_size}, ascending, and not empty")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what only other projects' checkpoints change is left out while it has its default."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if _FOREIGN.get(name, ...) != value}

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
    # An unknown algorithm is told by the configuration itself.
    kind = ALGORITHMS.get(options.get("algorithm", "dspark"), ALGORITHMS["dspark"])
    head = options.get("head", "markov" if kind.heads else "none")
    confidence = options.get("confidence", kind.heads)
    values: dict[str, Any] = {
        "algorithm": "dspark",
        "layout": kind.layouts[0],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": kind.layers or 5,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": _rope_theta(config),
        "vocab_size": config["vocab_size"],
        "captured_layers": 1 if kind.context == "last_hidden" else captured_layers,
        "block_length": kind.block or 7,
        "head": head,
        "head_rank": 0 if head == "none" else 256,
        "confidence": confidence,
        "confidence_markov": bool(confidence) and head != "none",
        "qk_norm": family.qk_norm,
        "activation": "silu" if (config.get("hidden_activation") or config.get("hidden_act", "silu")) == "silu" else "gelu_tanh",
        "window": None,
    }
    return DrafterConfig.from_dict({**values, **options})


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's (global) rotary positions: plain fields before transformers 5, nested by layer type in Gemma."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return {"rope_theta": config.get("rope_theta"), **rope}


def _rope_theta(config: Mapping[str, Any]) -> float:
    theta = rope_parameters(config)["rope_theta"]
    return 10000.0 if theta is None else float(theta)
