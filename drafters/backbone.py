"""The parallel backbone of DSpark and DFlash: fuse the target's states into context, run a block of slots over it (DESIGN 5).

Its parts (rotary positions, projections, feed-forward, context cache) serve the chains too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.attention import BlockAttention, Slots, joint_attention, plan_attention, visible_context
from drafters.batch import TrainBatch
from drafters.config import DrafterConfig
from drafters.errors import DrafterError
from drafters.norm import RMSNorm, rms_norm
from drafters.precision import Linear
from drafters.target_head import TargetHead


class Rotary:
    """Rotary positions, the two halves of a head rotated against each other (the Llama convention)."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, share: float = 1.0) -> None:
        # Frequencies in float64: at position 100,000 float32 angles are off by some 0.01.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
        frequencies = theta**-exponents
        frequencies[int(share * head_dim // 2) :] = 0  # the pairs beyond that share do not turn
        angles = positions[..., None].double() * frequencies
        self.cos, self.sin = angles.cos().to(dtype)[..., None, :], angles.sin().to(dtype)[..., None, :]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., heads, head_dim] at these positions [...]."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)


class ContextCache:
    """Per-request keys and values of the context, one pair a layer.

    Attributes:
        lengths: [B] int64, context positions held per request; the next one has position lengths[b].
        keys, values: per layer [B, max_length, kv_heads, head_dim]; entries past a request's length are never read.
        pending: [B, H] in a chain, else [B, 0]: the state of the last position held, whose row waits for the token after it.
    """

    def __init__(self, config: DrafterConfig, batch_size: int, max_length: int, like: Tensor, pending: int = 0) -> None:
        shape, layers = (batch_size, max_length, config.num_kv_heads, config.head_dim), range(config.num_layers)
        self.max_length = max_length
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in layers]
        self.pending = torch.zeros(batch_size, pending, dtype=like.dtype, device=like.device)

    def truncate(self, lengths: Tensor) -> None:
        """Forget positions from lengths[b] on.

        Raises:
            DrafterError: where a request holds fewer positions than that, or in a chain, which keeps no state but the last.
        """
        if bool((lengths > self.lengths).any()) or bool((lengths < 0).any()) or self.pending.shape[1]:
            raise DrafterError(f"cannot truncate a context of {self.lengths.tolist()} positions to {lengths.tolist()}")
        self.lengths = lengths.to(self.lengths)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep the given requests, in that order. Only rows whose place changes are copied."""
        goal = [new for new, old in enumerate(rows) if old != new]
        source = [rows[new] for new in goal]
        for planes in (self.keys, self.values):
            for layer, plane in enumerate(planes):
                if goal:
                    plane[goal] = plane[source]
                planes[layer] = plane[: len(rows)]
        self.lengths, self.pending = self.lengths[list(rows)], self.pending[list(rows)]

    def part(self, rows: Tensor) -> ContextCache:
        """A copy of some requests' context ([n] int64), to draft for them alone."""
        some, longest = copy.copy(self), int(self.lengths[rows].max())
        some.max_length, some.lengths, some.pending = longest, self.lengths[rows], self.pending[rows]
        some.keys = [plane[rows, :longest] for plane in self.keys]
        some.values = [plane[rows, :longest] for plane in self.values]
        return some

    def before(self, starts: Tensor, window: int | None) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """What blocks that start at positions starts ([B]) may see, or little more.

        With a window that is so many positions at most, however long the texts are.

        Returns:
            Per layer keys and values [B, T, kv_heads, head_dim]; their positions, [T] or [B, T], below 0 where there is nothing.
        """
        longest = int(starts.max())
        if window is None or window > longest:
            positions = torch.arange(longest, device=starts.device)
            return [(keys[:, :longest], values[:, :longest]) for keys, values in zip(self.keys, self.values, strict=True)], positions
        positions = starts[:, None] + torch.arange(1 - window, 0, device=starts.device)
        places = torch.arange(len(starts), device=starts.device)[:, None], positions.clamp(min=0)
        return [(keys[places], values[places]) for keys, values in zip(self.keys, self.values, strict=True)], positions

    def require_room(self, features: Tensor, counts: Tensor, width: int) -> None:
        """DrafterError unless the first counts[b] rows of features [B, n, width] can be appended to every request."""
        batch_size, n, given = features.shape
        if batch_size != len(self.lengths) or given != width or bool((counts > n).any()):
            raise DrafterError(
                f"context features [{batch_size}, {n}, {given}] with counts {counts.tolist()} do not fit a cache of {len(self.lengths)} "
                f"requests and captured states of {width} numbers a position"
            )
        if bool((self.lengths + counts > self.max_length).any()):
            raise DrafterError(f"context of {(self.lengths + counts).max()} positions exceeds the cache's max_length {self.max_length}")

    def require_context(self, positions: Tensor) -> None:
        """DrafterError where the context before an anchor [B] is not held."""
        if bool((self.lengths < positions).any()):
            raise DrafterError(
                f"anchors at {positions.tolist()} need the context before them, the cache holds {self.lengths.tolist()} positions"
            )


def rotary_of(config: DrafterConfig, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """The drafter's rotary positions [...]."""
    return Rotary(positions, config.head_dim, config.rope_theta, dtype, config.rotary_share)


class Attention(nn.Module):
    """Projections of one layer; context and block share K, V and the key norm. `inputs` numbers a slot come in, H go out."""

    def __init__(self, config: DrafterConfig, inputs: int, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(inputs, width, bf16=bf16, dtype=dtype)
        self.k_proj = Linear(inputs, kv_width, bf16=bf16, dtype=dtype)
        self.v_proj = None if config.shared_key_value else Linear(inputs, kv_width, bf16=bf16, dtype=dtype)
        self.o_proj = Linear(width, config.hidden_size, bf16=bf16, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else nn.Identity()
        self.gemma4, self.eps = config.layer_style == "gemma4", config.rms_norm_eps

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        q = rotary(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))))
        return q * self.head_dim**0.5 if self.gemma4 else q  # attention divides by it

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = keys if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotary(self.k_norm(keys)), rms_norm(values, values.new_ones(()), self.eps) if self.gemma4 else values


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bf16=bf16, dtype=dtype)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bf16=bf16, dtype=dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bf16=bf16, dtype=dtype)
        self.tanh = config.activation == "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj((F.gelu(gate, approximate="tanh") if self.tanh else F.silu(gate)) * self.up_proj(x))


class Layer(nn.Module):
    """What every layer does with its attention's output: residual stream, norms, feed-forward."""

    recompute = False
    """Whether the backward works the layer's activations out again, rather than keep them."""

    def add_end(self, config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> None:
        """Make the parts; called last, so that a layer's parts are initialised in the order in which they are used."""
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, bf16, dtype)
        self.gemma4 = config.layer_style == "gemma4"
        if self.gemma4:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.layer_scalar = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def end(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream before attention and attention's output, [..., H] each -> the layer's output."""
        if not self.gemma4:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return (x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))) * self.layer_scalar


class DraftLayer(Layer):
    """Transformer layer over block slots; the context enters as keys and values only and does not pass the input norm."""

    def __init__(self, config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, config.hidden_size, bf16, dtype)
        self.add_end(config, bf16, dtype)

    def forward(self, x: Tensor, rotary: Rotary, context_k: Tensor, context_v: Tensor, attend: BlockAttention) -> Tensor:
        return recomputed(self.recompute, self._forward, x, rotary, context_k, context_v, attend)

    def context_keys_values(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values of the context, whose features do not pass the input norm."""
        return self.self_attn.keys_values(context, rotary)

    def _forward(self, x: Tensor, rotary: Rotary, context_k: Tensor, context_v: Tensor, attend: BlockAttention) -> Tensor:
        normed = self.input_layernorm(x)
        block_k, block_v = self.self_attn.keys_values(normed, rotary)
        mixed = attend(self.self_attn.queries(normed, rotary), context_k, context_v, block_k, block_v)
        return self.end(x, self.self_attn.o_proj(mixed.flatten(-2)))


class Backbone(nn.Module):
    """H_ctx = RMSNorm(W_c [h^(l1); ...; h^(lm)]), then layers over [anchor, mask, ..., mask]."""

    def __init__(self, config: DrafterConfig, target_head: TargetHead) -> None:
        super().__init__()
        dtype, bf16 = target_head.master_dtype, target_head.compute_dtype == torch.bfloat16
        self.config = config
        self.fc = Linear(config.captured_layers * config.hidden_size, config.hidden_size, bf16=bf16, dtype=dtype)
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.layers = nn.ModuleList(DraftLayer(config, bf16, dtype) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        init_linears(self)

    def forward(self, batch: TrainBatch, target_head: TargetHead, backend: str) -> Tensor:
        """Hidden states of every predicted slot, [A, g, H]; slot k predicts the token at anchor + k + 1 in either layout."""
        slots = self.config.input_slots
        attend = plan_attention(batch, Slots(slots, self.config.window), backend)
        context = self.fuse(batch.context)
        return self._run(
            target_head,
            batch.input_ids[batch.anchors],
            batch.positions[batch.anchors],
            [layer.context_keys_values(context, self._rotary(batch.positions)) for layer in self._layers()],
            attend,
            slots,
        )

    def fuse(self, features: Tensor) -> Tensor:
        """Captured states [..., L * H] -> context features [..., H]."""
        return self.context_norm(self.fc(features.to(self.norm.weight.dtype)))

    def new_cache(self, batch_size: int, max_length: int) -> ContextCache:
        """An empty ContextCache on the drafter's device and dtype."""
        return ContextCache(self.config, batch_size, max_length, self.norm.weight)

    @torch.no_grad()
    def extend(self, cache: ContextCache, features: Tensor, counts: Tensor) -> None:
        """Append the first counts[b] rows of features [B, n, L * H] to request b's context.

        Raises:
            DrafterError: shapes that disagree, or more positions than the cache was made for.
        """
        cache.require_room(features, counts, self.fc.in_features)
        rows, columns = (torch.arange(features.shape[1], device=counts.device) < counts[:, None]).nonzero(as_tuple=True)
        places = cache.lengths[rows] + columns
        context, rotary = self.fuse(features[rows, columns]), self._rotary(places)
        for layer, keys, values in zip(self._layers(), cache.keys, cache.values, strict=True):
            keys[rows, places], values[rows, places] = layer.context_keys_values(context, rotary)
        cache.lengths = cache.lengths + counts

    @torch.no_grad()
    def block(
        self,
        cache: ContextCache,
        anchor_tokens: Tensor,
        anchor_positions: Tensor,
        target_head: TargetHead,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Inference form of `forward`: one block per request, [B, g, H]; only positions before the anchor are attended to.

        Args:
            lengths: [B] int64, draft tokens of each request's block (1 to g), all g where None. Slots see each other, so what a slot of a
                shorter block says is not what it says in a whole one. Then [B, longest, H] comes back, meaningless past a length.

        Raises:
            DrafterError: where the context before an anchor is not in the cache.
        """
        cache.require_context(anchor_positions)
        context, positions = cache.before(anchor_positions, self.config.window)
        spare, own_visible = self.config.input_slots - self.config.block_length, None
        slots = self.config.input_slots if lengths is None else int(lengths.max()) + spare
        if lengths is not None and bool((lengths + spare < slots).any()):
            own_visible = torch.arange(slots, device=lengths.device) < (lengths + spare)[:, None]
        visible = visible_context(anchor_positions, positions, Slots(slots, self.config.window))

        def attend(q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor) -> Tensor:
            return joint_attention(q, context_k, context_v, block_k, block_v, visible, own_visible)

        return self._run(target_head, anchor_tokens, anchor_positions, context, attend, slots)

    def _run(
        self,
        target_head: TargetHead,
        tokens: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        attend: BlockAttention,
        slots: int,
    ) -> Tensor:
        ids = tokens[:, None].repeat(1, slots)
        ids[:, 1:] = self.config.mask_token_id
        x = target_head.embed(ids)
        rotary = self._rotary(positions[:, None] + torch.arange(slots, device=positions.device))
        for layer, (context_k, context_v) in zip(self.layers, context, strict=True):
            x = layer(x, rotary, context_k, context_v, attend)
        # zlab's slot 0 stands on the anchor and is not trained; dropping it makes slot k predict anchor + k + 1 in both layouts.
        return self.norm(x[:, self.config.input_slots - self.config.block_length :])

    def _rotary(self, positions: Tensor) -> Rotary:
        return rotary_of(self.config, positions, self.norm.weight.dtype)

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


def recomputed(recompute: bool, layer: Callable[..., Any], *inputs: Any) -> Any:
    """What a layer gives for its inputs; its activations are not kept for the backward if so asked."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
    return layer(*inputs)


def init_linears(module: nn.Module) -> None:
    """Fresh weights of every linear map below `module`."""
    for inner in module.modules():
        if isinstance(inner, Linear):
            nn.init.normal_(inner.weight, std=0.02)
