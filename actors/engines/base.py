"""What a producer asks of a target engine, whichever it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class EngineSettings:
    """How to run the target. `dtype` is what the engine computes in; the cache stores bf16 whatever it is."""

    model: str  # local folder, as resolved
    layer_ids: tuple[int, ...]  # 0-based decoder layers
    engine: str = "vllm"  # vllm | hf
    dtype: str = "bfloat16"
    max_length: int = 2048  # tokens of a row
    batch_tokens: int = 2048  # tokens of one forward pass
    batch_rows: int = 64
    threads: int = 1  # CPU threads of one engine process
    tensor_parallel: int = 1
    kv_cache_gib: int = 1  # CPU only


@dataclass(frozen=True)
class Captured:
    """Hidden states of one row: the residual stream, before the final norm, in the engine's dtype.

    Attributes:
        context: [L, T, H], after each captured decoder layer.
        last_hidden: [T, H], after the last layer.
    """

    context: Tensor
    last_hidden: Tensor


class HiddenStateEngine(Protocol):
    """Runs the target over whole rows and returns the states of exactly these rows, in their order."""

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        """Capture rows of token ids, each at most `max_length` long."""
        ...
