"""What differs between target families, as data: the one place to look and to extend.

A module that needs to know the family takes a `TargetFamily` and never a model's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafters.errors import DrafterError


@dataclass(frozen=True)
class TargetFamily:
    """How a target turns ids into embeddings and last hidden states into logits.

    Attributes:
        norm_plus_one: RMSNorm multiplies by (1 + weight) instead of weight (Gemma 1 to 3).
        embedding_scale: factor on the embedding, rounded to the embedding's dtype as the released implementations do.
        logit_softcap: c in c * tanh(logits / c), or None.
        logit_multiplier: factor on the logits before the softcap.
        qk_norm: the target's attention normalizes queries and keys per head; drafters of it do the same by default.
    """

    norm_plus_one: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_multiplier: float = 1.0
    qk_norm: bool = False


_PLAIN = {"llama", "mistral", "qwen2", "qwen2_moe", "smollm3"}
_PLAIN_QK = {"qwen3", "qwen3_moe"}
_GEMMA_PLUS_ONE = {"gemma", "gemma2", "gemma3", "gemma3_text"}
_GEMMA_PLAIN_NORM = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"}
KNOWN_MODEL_TYPES = tuple(sorted(_PLAIN | _PLAIN_QK | _GEMMA_PLUS_ONE | _GEMMA_PLAIN_NORM | {"granite"}))


def text_config(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a Hugging Face `config.json` (multimodal ones nest it under `text_config`)."""
    inner = model_config.get("text_config")
    return dict(inner) if isinstance(inner, Mapping) else dict(model_config)


def family_of(model_config: Mapping[str, Any]) -> TargetFamily:
    """The family of a target, from its Hugging Face `config.json`.

    Raises:
        DrafterError: for a model type that nobody has checked here; guessing would train against wrong logits in silence.
    """
    config = text_config(model_config)
    kind = config.get("model_type", model_config.get("model_type"))
    softcap = config.get("final_logit_softcapping")
    if kind in _PLAIN:
        return TargetFamily()
    if kind in _PLAIN_QK:
        return TargetFamily(qk_norm=True)
    if kind in _GEMMA_PLUS_ONE | _GEMMA_PLAIN_NORM:
        return TargetFamily(
            norm_plus_one=kind in _GEMMA_PLUS_ONE,
            embedding_scale=math.sqrt(config["hidden_size"]),
            logit_softcap=None if softcap is None else float(softcap),
            qk_norm=kind not in {"gemma", "gemma2"},
        )
    if kind == "granite":
        return TargetFamily(
            embedding_scale=float(config["embedding_multiplier"]),
            logit_multiplier=1.0 / float(config["logits_scaling"]),
        )
    known = ", ".join(KNOWN_MODEL_TYPES)
    raise DrafterError(f"model_type {kind!r} is not a known target family; known: {known}. Add it in drafters/family.py.")
