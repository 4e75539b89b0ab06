"""Attention of draft blocks: each block sees its sequence's context strictly before its start, and the slots of its own that it is given.

Parallel drafters ask for a whole block at once, with the keys of all its slots. Chains ask slot by slot, with the keys of the slots so far:
that is Eagle3's training-time test, causal over the target's rows plus the diagonal of the earlier steps.

Three interchangeable backends, equal in value: `split` (CPU: dense only in the context keys, one softmax over context and block scores),
`sdpa` (one masked call per sequence, quadratic in the number of blocks), `flex` (one call for the whole batch, CUDA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.batch import TrainBatch
from drafters.errors import DrafterError

BACKENDS = ("split", "sdpa", "flex")


@dataclass(frozen=True)
class Slots:
    """Which slots of every block ask at once, and what they may see. Slot j stands at position start + j.

    Attributes:
        count: m, slots that ask.
        window: a slot at q sees context positions p with q - p < window; None for all before the block's start.
        first: the first of them.
        keys: n, slots of the block whose keys they are given, all visible to all; m where None.
        lag: a block starts this many positions before its anchor (1 in a chain, whose first slot is the row before the anchor).
    """

    count: int
    window: int | None = None
    first: int = 0
    keys: int | None = None
    lag: int = 0

    @property
    def own(self) -> int:
        return self.count if self.keys is None else self.keys


class BlockAttention(Protocol):
    """Attention over one batch's blocks; made once per batch, called by every layer."""

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        """q [A, m, heads, d], context_k/v [N_tok, kv_heads, d], block_k/v [A, n, kv_heads, d] -> [A, m, heads, d]."""


def plan_attention(batch: TrainBatch, slots: Slots, backend: str) -> BlockAttention:
    """Prepare the masks of one batch (its packed sequences and anchors) for one of BACKENDS."""
    kinds: dict[str, type[SplitAttention] | type[SdpaAttention] | type[FlexAttention]] = {
        "split": SplitAttention,
        "sdpa": SdpaAttention,
        "flex": FlexAttention,
    }
    if backend not in kinds:
        raise DrafterError(f"attention backend {backend!r} is unknown, expected one of {', '.join(BACKENDS)}")
    return kinds[backend](batch, slots)


class _PerSequence:
    """For each sequence with anchors: its slice of blocks, its slice of context up to the last block, and who sees what there."""

    def __init__(self, batch: TrainBatch, slots: Slots) -> None:
        counts = torch.bincount(batch.anchor_sequence, minlength=len(batch.offsets) - 1).tolist()
        starts, self.parts, first = batch.offsets.tolist(), [], 0
        for sequence, count in enumerate(counts):
            if count == 0:
                continue
            blocks = slice(first, first + count)
            first += count
            begins = batch.anchors[blocks] - starts[sequence] - slots.lag
            length = max(int(begins[-1]), 0)
            visible = visible_context(begins, torch.arange(length, device=begins.device), slots)
            self.parts.append((blocks, slice(starts[sequence], starts[sequence] + length), visible))


def visible_context(starts: Tensor, positions: Tensor, slots: Slots) -> Tensor:
    """[B, m, T] bool: may a slot of the block starting at starts[b] see the context at positions[t], or [b, t]? Below 0 there is none."""
    positions = positions.expand(len(starts), -1)[:, None]
    before = (positions >= 0) & (positions < starts[:, None, None])
    if slots.window is None:
        return before.expand(-1, slots.count, -1)
    queries = starts[:, None] + slots.first + torch.arange(slots.count, device=starts.device)
    return before & (queries[:, :, None] - positions < slots.window)


def joint_attention(
    q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor, visible: Tensor, own_visible: Tensor | None = None
) -> Tensor:
    """Blocks against a context of their own (batched) or one in common, one softmax over context and block scores.

    Args:
        q: [B, m, heads, d].
        context_k, context_v: [T, kv_heads, d] shared by all blocks, or [B, T, kv_heads, d].
        block_k, block_v: [B, n, kv_heads, d], seen by every query of their block.
        visible: [B, m, T] bool for the context.
        own_visible: [B, n] bool, which of their block's keys its queries see; all where None.

    Returns:
        [B, m, heads, d].
    """
    blocks, slots, heads, d = q.shape
    kv_heads = block_k.shape[2]
    group = heads // kv_heads
    # [B, m, kv, group, d] -> [B, kv, group * m, d]: the query heads that share a key head become rows of one product.
    rows = (q * d**-0.5).view(blocks, slots, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(blocks, kv_heads, group * slots, d)
    own = rows @ block_k.permute(0, 2, 3, 1)
    if own_visible is not None:
        own = own.masked_fill(~own_visible[:, None, None], float("-inf"))
    if context_k.dim() == 3:
        flat = rows.transpose(0, 1).reshape(kv_heads, blocks * group * slots, d)
        seen = (flat @ context_k.permute(1, 2, 0)).view(kv_heads, blocks, group * slots, -1).transpose(0, 1)
    else:
        seen = rows @ context_k.permute(0, 2, 3, 1)
    hidden = ~visible[:, None, None].expand(-1, 1, group, -1, -1).reshape(blocks, 1, group * slots, -1)
    scores = torch.cat([seen.masked_fill(hidden, float("-inf")), own], dim=-1)
    weights = scores.softmax(-1)
    seen, own = weights.split([context_k.shape[-3], block_k.shape[1]], dim=-1)
    out = own @ block_v.transpose(1, 2)
    if context_v.dim() == 3:
        flat = seen.transpose(0, 1).reshape(kv_heads, blocks * group * slots, -1)
        out = out + (flat @ context_v.transpose(0, 1)).view(kv_heads, blocks, group * slots, d).transpose(0, 1)
    else:
        out = out + seen @ context_v.transpose(1, 2)
    return out.view(blocks, kv_heads, group, slots, d).permute(0, 3, 1, 2, 4).reshape(blocks, slots, heads, d)


class SplitAttention(_PerSequence):
    """Context scores dense per sequence, block scores block-diagonal, joined before one softmax."""

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        return torch.cat(
            [
                joint_attention(q[blocks], context_k[context], context_v[context], block_k[blocks], block_v[blocks], visible)
                for blocks, context, visible in self.parts
            ]
        )


class SdpaAttention(_PerSequence):
    """torch's scaled_dot_product_attention with a dense mask over context and all blocks of a sequence."""

    def __init__(self, batch: TrainBatch, slots: Slots) -> None:
        super().__init__(batch, slots)
        self.masks = []
        for blocks, _, visible in self.parts:
            count = blocks.stop - blocks.start
            same = torch.eye(count, dtype=torch.bool, device=visible.device)
            same = same.repeat_interleave(slots.count, 0).repeat_interleave(slots.own, 1)
            self.masks.append(torch.cat([visible.reshape(count * slots.count, -1), same], dim=1))

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        results = []
        for (blocks, context, _), mask in zip(self.parts, self.masks, strict=True):
            k = torch.cat([context_k[context], block_k[blocks].flatten(0, 1)]).transpose(0, 1)[None]
            v = torch.cat([context_v[context], block_v[blocks].flatten(0, 1)]).transpose(0, 1)[None]
            queries = q[blocks].flatten(0, 1).transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask[None, None], enable_gqa=True)
            results.append(out[0].transpose(0, 1).reshape(q[blocks].shape))
        return torch.cat(results)


class FlexAttention:
    """flex_attention over the whole batch: keys are all context tokens, then all block slots; the mask is one rule over index tables.

    On the CPU it gives values only (torch has no backward for it there).
    """

    def __init__(self, batch: TrainBatch, slots: Slots) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        tokens, blocks = len(batch.input_ids), batch.num_anchors
        device = batch.input_ids.device
        steps = slots.first + torch.arange(slots.count, device=device)
        lengths = batch.offsets[1:] - batch.offsets[:-1]
        token_sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        query_block = torch.arange(blocks, device=device).repeat_interleave(slots.count)
        query_start = batch.positions[batch.anchors].repeat_interleave(slots.count) - slots.lag
        query_position = query_start + steps.repeat(blocks)
        query_sequence = batch.anchor_sequence.repeat_interleave(slots.count)
        # Tables over all keys: context entries carry their position and block -1, block slots carry their block and no position.
        own_block = torch.arange(blocks, device=device).repeat_interleave(slots.own)
        key_block = torch.cat([torch.full((tokens,), -1, device=device), own_block])
        key_sequence = torch.cat([token_sequence, batch.anchor_sequence.repeat_interleave(slots.own)])
        key_position = torch.cat([batch.positions, torch.zeros_like(own_block)])
        reach = tokens + int(steps[-1]) + 2 if slots.window is None else slots.window

        def rule(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            context = (key_block[key] < 0) & (key_sequence[key] == query_sequence[query]) & (key_position[key] < query_start[query])
            return (context & (query_position[query] - key_position[key] < reach)) | (key_block[key] == query_block[query])

        self.mask = create_block_mask(rule, None, None, blocks * slots.count, tokens + blocks * slots.own, device=str(device))
        self.device = device

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
        if self.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
            raise DrafterError("attention backend 'flex' has no backward on the CPU; use 'split' there")
        k = torch.cat([context_k, block_k.flatten(0, 1)]).transpose(0, 1)[None]
        v = torch.cat([context_v, block_v.flatten(0, 1)]).transpose(0, 1)[None]
        queries = q.flatten(0, 1).transpose(0, 1)[None]
        out = _flex(self.device.type)(queries, k, v, block_mask=self.mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape)


_compiled: dict[str, Any] = {}


def _flex(device: str) -> Any:
    """flex_attention, compiled once on accelerators; on the CPU the plain one, which spares tests a compilation."""
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cpu":
        return flex_attention
    if device not in _compiled:
        _compiled[device] = torch.compile(flex_attention)
    return _compiled[device]
