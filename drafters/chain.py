"""Drafters that work slot by slot on their own hidden states: Eagle3 and MTP-1 (DESIGN 5).

Row t joins the target's state of position t with the token after it and predicts token t + 2. A block that is anchored at a starts at row
a - 1: slot 0 is that row; slot k > 0 takes slot k-1's hidden state instead of the target's, and the token at a + k; it stands at a - 1 + k.
Every slot attends to the rows before slot 0 and to the slots up to itself. In training that is Eagle3's training-time test: causal over the
first step, plus the diagonal of the later ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drafters.attention import BlockAttention, Slots, joint_attention, plan_attention, visible_context
from drafters.backbone import Attention, ContextCache, Layer, Rotary, init_linears, recomputed, rotary_of
from drafters.batch import TrainBatch
from drafters.config import DrafterConfig
from drafters.errors import DrafterError
from drafters.norm import RMSNorm
from drafters.precision import Linear
from drafters.target_head import TargetHead


class ChainLayer(Layer):
    """Transformer layer whose attention reads `inner`, which need not be the normed residual stream."""

    def __init__(self, config: DrafterConfig, inputs: int, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, inputs, bf16, dtype)
        self.add_end(config, bf16, dtype)

    def forward(
        self,
        x: Tensor,
        inner: Tensor,
        rotary: Rotary,
        context: tuple[Tensor, Tensor],
        earlier: tuple[Tensor, Tensor] | None,
        attend: BlockAttention,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One slot of every block: x [A, H], inner [A, inputs], keys and values of the slots before it ([A, k, kv_heads, d] each).

        Returns:
            The hidden state [A, H], and the slots' keys and values with this one's.
        """
        return recomputed(self.recompute, self._forward, x, inner, rotary, context, earlier, attend)

    def _forward(
        self,
        x: Tensor,
        inner: Tensor,
        rotary: Rotary,
        context: tuple[Tensor, Tensor],
        earlier: tuple[Tensor, Tensor] | None,
        attend: BlockAttention,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        k, v = (part[:, None] for part in self.self_attn.keys_values(inner, rotary))
        if earlier is not None:
            k, v = torch.cat([earlier[0], k], dim=1), torch.cat([earlier[1], v], dim=1)
        mixed = attend(self.self_attn.queries(inner, rotary)[:, None], *context, k, v)
        return self.end(x, self.self_attn.o_proj(mixed.flatten(1))), (k, v)


class ChainRun:
    """The slots of one block per row, worked out one after the other; the same for training and drafting.

    Args:
        chain: whose slots.
        state: [A, H] the target's state at each block's start.
        starts: [A] int64, its position.
        context: keys and values of the rows before it.
        attend: slot -> its attention.
    """

    def __init__(
        self,
        chain: Chain,
        target_head: TargetHead,
        state: Tensor,
        starts: Tensor,
        context: tuple[Tensor, Tensor],
        attend: Callable[[int], BlockAttention],
    ) -> None:
        self._chain, self._target_head, self._context, self._attend = chain, target_head, context, attend
        self._state, self._starts, self._slot = state, starts, 0
        self._slots: tuple[Tensor, Tensor] | None = None

    def step(self, tokens: Tensor) -> Tensor:
        """The next slot: tokens [A] int64 at anchor + k -> h [A, H], which predicts the token at anchor + k + 1."""
        chain = self._chain
        x, inner = chain.enter(self._state, self._target_head.embed(tokens))
        rotary, attend = chain.rotary(self._starts + self._slot), self._attend(self._slot)
        self._state, self._slots = chain.layers[0](x, inner, rotary, self._context, self._slots, attend)
        self._slot += 1
        return chain.leave(self._state, self._target_head)


class Chain(nn.Module):
    """What Eagle3 and MTP-1 share. They differ in how a row's state and token become the layer's input, and in the final norm.

    Args:
        states: H * L or H, width of the target's states at a position.
        inputs: width of what the layer's attention reads.
    """

    def __init__(self, config: DrafterConfig, target_head: TargetHead, states: int, inputs: int) -> None:
        super().__init__()
        self.dtype, self.bf16 = target_head.master_dtype, target_head.compute_dtype == torch.bfloat16
        self.config, self.states = config, states
        self.embed_norm = self._norm()
        self.hidden_norm = self._norm()
        self.layers = nn.ModuleList([ChainLayer(config, inputs, self.bf16, self.dtype)])

    def source(self, states: Tensor) -> Tensor:
        """The target's states [..., states] -> what slot 0 takes for a hidden state, [..., H]."""
        raise NotImplementedError

    def enter(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """State and token embedding of a row, [..., H] each -> the residual stream [..., H] and what attention reads [..., inputs]."""
        raise NotImplementedError

    def leave(self, hidden: Tensor, target_head: TargetHead) -> Tensor:
        """Hidden state of a slot -> what the LM head reads."""
        raise NotImplementedError

    def batch_states(self, batch: TrainBatch) -> Tensor:
        """The target's states at every position, [N_tok, states]."""
        return batch.context

    def forward(self, batch: TrainBatch, target_head: TargetHead, backend: str) -> Tensor:
        """h [A, g, H]; slot k predicts the token at anchor + k + 1, given the data's tokens before it (the training-time test)."""
        source = self.source(self.batch_states(batch))
        # The token after a sequence's last position is another's; no block has that row in its context.
        _, inner = self.enter(source, target_head.embed(batch.input_ids.roll(-1)))
        context = self._attention().keys_values(inner, self.rotary(batch.positions))
        first = (batch.anchors - 1).clamp(min=0)

        def attend(slot: int) -> BlockAttention:
            return plan_attention(batch, Slots(1, self.config.window, slot, slot + 1, lag=1), backend)

        run = ChainRun(self, target_head, source[first], batch.positions[batch.anchors] - 1, context, attend)
        last = len(batch.input_ids) - 1
        steps = range(self.config.block_length)
        return torch.stack([run.step(batch.input_ids[(batch.anchors + slot).clamp(max=last)]) for slot in steps], dim=1)

    def new_cache(self, batch_size: int, max_length: int) -> ContextCache:
        """An empty context; its last position's row waits for the token after it."""
        return ContextCache(self.config, batch_size, max_length, self.hidden_norm.weight, pending=self.config.hidden_size)

    @torch.no_grad()
    def extend(self, cache: ContextCache, features: Tensor, counts: Tensor, tokens: Tensor, target_head: TargetHead) -> None:
        """Append the first counts[b] positions: features [B, n, states] and tokens [B, n]. A token completes the row before it.

        Raises:
            DrafterError: shapes that disagree, or more positions than the cache was made for.
        """
        cache.require_room(features, counts, self.states)
        requests, columns = torch.arange(len(counts), device=counts.device), torch.arange(features.shape[1], device=counts.device)
        given = columns < counts[:, None]
        source = cache.pending.new_zeros(*given.shape, self.config.hidden_size)
        source[given] = self.source(features[given])
        before = torch.cat([cache.pending[:, None], source[:, :-1]], dim=1)
        places = cache.lengths[:, None] + columns - 1
        complete = given & (places >= 0)
        rows, places = complete.nonzero(as_tuple=True)[0], places[complete]
        _, inner = self.enter(before[complete], target_head.embed(tokens[complete]))
        cache.keys[0][rows, places], cache.values[0][rows, places] = self._attention().keys_values(inner, self.rotary(places))
        cache.pending = torch.where(counts[:, None] > 0, source[requests, (counts - 1).clamp(min=0)], cache.pending)
        cache.lengths = cache.lengths + counts

    def begin(self, cache: ContextCache, anchor_positions: Tensor, target_head: TargetHead) -> ChainRun:
        """Inference form of `forward`: anchors [B] right after the context.

        Raises:
            DrafterError: where the cache holds less or more than the context before an anchor, or nothing.
        """
        cache.require_context(anchor_positions)
        if bool((cache.lengths > anchor_positions).any()) or bool((anchor_positions < 1).any()):
            raise DrafterError(f"a chain goes on after the {cache.lengths.tolist()} positions it holds, not at {anchor_positions.tolist()}")
        starts = anchor_positions - 1
        (context,), positions = cache.before(starts, self.config.window)

        def attend(slot: int) -> BlockAttention:
            visible = visible_context(starts, positions, Slots(1, self.config.window, slot))
            return lambda q, context_k, context_v, block_k, block_v: joint_attention(q, context_k, context_v, block_k, block_v, visible)

        return ChainRun(self, target_head, cache.pending, starts, context, attend)

    def rotary(self, positions: Tensor) -> Rotary:
        return rotary_of(self.config, positions, self.dtype)

    def _attention(self) -> Attention:
        attention = self.layers[0].self_attn
        assert isinstance(attention, Attention)
        return attention

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.dtype)

    def _linear(self, inputs: int) -> Linear:
        return Linear(inputs, self.config.hidden_size, bf16=self.bf16, dtype=self.dtype)


class Eagle3(Chain):
    """Attention reads [norm(emb(x_{t+1})); norm(fused features of t)], 2H wide, over a residual stream of the features."""

    def __init__(self, config: DrafterConfig, target_head: TargetHead) -> None:
        super().__init__(config, target_head, config.captured_layers * config.hidden_size, 2 * config.hidden_size)
        self.fc = self._linear(self.states)
        self.norm = self._norm()
        init_linears(self)

    def source(self, states: Tensor) -> Tensor:
        return self.fc(states.to(self.dtype))

    def enter(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return state, torch.cat([self.embed_norm(embedded), self.hidden_norm(state)], dim=-1)

    def leave(self, hidden: Tensor, target_head: TargetHead) -> Tensor:
        return self.norm(hidden)


class Mtp1(Chain):
    """A projection of [norm(h_t); norm(emb(x_{t+1}))] to H, one transformer block, the target's own final norm; h_t as before that norm."""

    def __init__(self, config: DrafterConfig, target_head: TargetHead) -> None:
        super().__init__(config, target_head, config.hidden_size, config.hidden_size)
        self.proj = self._linear(2 * config.hidden_size)
        self.input_layernorm = self._norm()
        init_linears(self)

    def batch_states(self, batch: TrainBatch) -> Tensor:
        if bool((batch.teacher_row < 0).any()):
            raise DrafterError(
                "mtp1 attends to the last hidden state of every position, and this batch lacks some; "
                "build the cache with cache.last_hidden_rows=all"
            )
        return batch.last_hidden[batch.teacher_row]

    def source(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def enter(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.proj(torch.cat([self.hidden_norm(state), self.embed_norm(embedded)], dim=-1))
        return x, self.input_layernorm(x)

    def leave(self, hidden: Tensor, target_head: TargetHead) -> Tensor:
        return target_head.normed(hidden)


def make_chain(config: DrafterConfig, target_head: TargetHead) -> Chain:
    """The chain that the configuration names."""
    kinds: dict[str, type[Eagle3] | type[Mtp1]] = {"eagle3": Eagle3, "mtp1": Mtp1}
    return kinds[config.algorithm](config, target_head)
