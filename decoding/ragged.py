"""A forward pass over the real tokens of a batch only, where its requests bring different numbers of them.

Everything but attention works token by token, so the tokens of all requests go through it side by side as one row. Attention gets them
padded again, each request beside its own keys, and requests of about one length together. So a pass costs what its tokens and their texts
cost, whatever the longest request brings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "ragged_sdpa"
_KEYS_OF_A_CALL = 512
"""A call of its own for some requests takes as long as attending to so many keys more; measured on a CPU."""


@dataclass(frozen=True)
class RaggedRows:
    """Token n of the flat row is column `columns[n]` of request `rows[n]`, in a padded block of `batch` x `width`."""

    rows: Tensor
    columns: Tensor
    batch: int
    width: int

    @classmethod
    def of(cls, counts: Tensor, width: int) -> "RaggedRows":
        """The first `counts[b]` ([B] int64) of each request's `width` columns."""
        rows, columns = (torch.arange(width, device=counts.device) < counts[:, None]).nonzero(as_tuple=True)
        return cls(rows, columns, len(counts), width)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, Q, ...] -> [1, N, ...]"""
        return padded[self.rows, self.columns][None]

    def pad(self, flat: Tensor) -> Tensor:
        """[1, N, ...] -> [B, Q, ...], zeros where there is no token."""
        padded = flat.new_zeros(self.batch, self.width, *flat.shape[2:])
        padded[self.rows, self.columns] = flat[0]
        return padded


@dataclass(frozen=True)
class Neighbours:
    """Requests `rows` of a batch, which look at keys [0, span) at most."""

    rows: slice
    span: int


def neighbours(keys: np.ndarray) -> list[Neighbours]:
    """Cut a batch where attention then costs least: each part's requests pay for the longest of them, each part for a call.

    Args:
        keys: [B] that each request looks at. Parts are runs of the batch, so it does best where the requests are sorted by it.
    """
    count = len(keys)
    least, end = np.zeros(count + 1), np.zeros(count, dtype=np.int64)  # of what begins at a request: its cost, where its first part ends
    for start in range(count - 1, -1, -1):
        costs = np.maximum.accumulate(keys[start:]) * np.arange(1, count - start + 1) + _KEYS_OF_A_CALL + least[start + 1 :]
        best = int(costs.argmin())
        least[start], end[start] = costs[best], start + 1 + best
    parts, start = [], 0
    while start < count:
        rows = slice(start, int(end[start]))
        parts.append(Neighbours(rows, int(keys[rows].max())))
        start = rows.stop
    return parts


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    parts: Sequence[Neighbours],
    ragged: RaggedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA, part by part.

    The query is [B, heads, Q, d] or flat, [1, heads, N, d]; keys and values are [B, key heads, span, d], the mask [B, 1, Q, span].
    """
    padded = query if ragged is None else ragged.pad(query.transpose(1, 2)).transpose(1, 2)
    attended = [
        _of_neighbours(
            module,
            padded[part.rows],
            key[part.rows, :, : part.span],
            value[part.rows, :, : part.span],
            attention_mask[part.rows, :, :, : part.span],
            **kwargs,
        )
        for part in parts
    ]
    output = attended[0] if len(attended) == 1 else torch.cat(attended)
    return output if ragged is None else ragged.pack(output), None


def _of_neighbours(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    """Attended values [B, Q, heads, d].

    Query heads that share a key head stand below each other as queries of that one head. Transformers' own form copies keys and values for
    each of them instead, which with many requests and few tokens of each takes longer than all the rest of a pass.
    """
    batch, heads, width, size = query.shape
    groups = heads // key.shape[1]
    if groups * width > heads * size:  # a long text: its repeated mask would be larger than repeated keys
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    stacked = query.reshape(batch, -1, groups * width, size)
    attended = scaled_dot_product_attention(stacked, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=kwargs.get("scaling"))
    return attended.reshape(batch, heads, width, size).transpose(1, 2).contiguous()


AttentionInterface.register(_NAME, _attention)


@contextmanager
def ragged_attention(config: Any) -> Iterator[None]:
    """A model of this configuration with SDPA attends as above for the length of the block; it takes `parts=`, and `ragged=` if flat."""
    before = config._attn_implementation
    config._attn_implementation = _NAME if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before
