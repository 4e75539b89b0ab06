"""A forward pass over the real tokens of a batch only, where its requests bring different numbers of them.

Everything but attention works token by token, so the tokens of all requests go through it side by side as one row. Attention gets them
padded again, each request beside its own keys. So a pass costs what its tokens cost, whatever the longest request brings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "ragged_sdpa"


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


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, ragged: RaggedRows | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """SDPA for a query [B, heads, Q, d] or a flat one [1, heads, N, d], keys and values [B, key heads, span, d] and a mask [B, 1, Q, span].

    Query heads that share a key head stand below each other as queries of that one head. Transformers' own form copies keys and values for
    each of them instead, which with many requests and few tokens of each takes longer than all the rest of a pass.
    """
    padded = query if ragged is None else ragged.pad(query.transpose(1, 2)).transpose(1, 2)
    batch, heads, width, size = padded.shape
    groups = heads // key.shape[1]
    if groups * width <= heads * size:
        stacked = padded.reshape(batch, -1, groups * width, size)
        mask = attention_mask.repeat(1, 1, groups, 1)
        attended = scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
        output = attended.reshape(batch, heads, width, size).transpose(1, 2).contiguous()
    else:  # a long text: its repeated mask would be larger than repeated keys
        output, _ = sdpa_attention_forward(module, padded, key, value, attention_mask, **kwargs)
    return output if ragged is None else ragged.pack(output), None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def ragged_attention(config: Any) -> Iterator[None]:
    """A model of this configuration with SDPA attends as above for the length of the block; flat queries need `ragged=` as an argument."""
    before = config._attn_implementation
    config._attn_implementation = _NAME if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before
