"""A whole drafter: backbone or chain, sequential head, confidence head, its training step and what decoding calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.anchors import slot_weights
from drafters.backbone import Backbone, ContextCache, Layer
from drafters.batch import BlockTargets, TrainBatch
from drafters.chain import Chain, ChainRun, make_chain
from drafters.confidence import ConfidenceHead
from drafters.config import DrafterConfig
from drafters.errors import DrafterError
from drafters.heads import SequentialHead, make_head
from drafters.losses import DraftLoss, LossWeights, draft_loss
from drafters.precision import Linear, bf16_linear, project
from drafters.target_head import TargetHead
from drafters.vocabulary import make_vocabulary

Metrics = dict[str, tuple[Tensor, Tensor]]


class Drafter(nn.Module):
    """DSpark, DFlash, Eagle3 or MTP-1 over a frozen target head.

    Weights are float32 (float64 for a float64 head) and freshly initialised, all norms with ones (the target's final norm would
    start the logits two or three times as wide, hence confidently wrong). state_dict holds the
    trainable tensors only. Wrapped in DDP, pass `broadcast_buffers=False`: the frozen head is the same on every rank by contract.

    Args:
        config: the architecture; its sizes must be the target head's.
        target_head: loaded with the target's weights; its dtype decides the precision.
        attention: "split", "sdpa" or "flex"; by default split on the CPU and flex on CUDA.
    """

    def __init__(self, config: DrafterConfig, target_head: TargetHead, attention: str | None = None) -> None:
        super().__init__()
        for name in ("hidden_size", "vocab_size"):
            if getattr(config, name) != getattr(target_head, name):
                raise DrafterError(
                    f"the drafter's {name} is {getattr(config, name)}, the target head's {getattr(target_head, name)}; they must be equal"
                )
        target_head.require_loaded()
        self.config, self.attention = config, attention
        self.target_head = target_head
        dtype, bf16 = target_head.master_dtype, target_head.compute_dtype == torch.bfloat16
        self.backbone: Backbone | Chain = make_chain(config, target_head) if config.chain else Backbone(config, target_head)
        self.vocabulary = make_vocabulary(config, target_head)
        self.head = make_head(config, bf16, dtype)
        self.confidence = ConfidenceHead(config, dtype) if config.confidence else None
        self.held = False  # in bf16, for decoding

    # Training

    def forward(self, batch: TrainBatch, weights: LossWeights, decay: float, denominator: Tensor | float) -> tuple[Tensor, Metrics]:
        """`training_step`, so that DDP and FSDP wrap it."""
        return self.training_step(batch, weights, decay, denominator)

    def training_step(self, batch: TrainBatch, weights: LossWeights, decay: float, denominator: Tensor | float) -> tuple[Tensor, Metrics]:
        """Loss of one micro-batch as its share of the global batch's, and its metrics.

        Args:
            batch: packed sequences; without any anchor the loss is zero and reaches every parameter.
            weights: of the loss's terms.
            decay: slot k counts exp(-k / decay); with Eagle3 divided by how many anchors of its sequence have that slot.
            denominator: `denominator(batch, decay)` summed over all ranks and accumulation steps of this optimizer step. Gradients are
                then to be *summed* over ranks (under DDP, which averages, multiply the loss by the world size).

        Returns:
            The scalar loss, and metrics name -> (numerator, denominator), float64 scalars to be added up before dividing:
            loss, the terms ce, tv, ... and confidence_bce (weighted slots), confidence_bias, one_minus_tv@k, argmax_match@k for k = 1..g
            (slots) and tau_teacher_forced (blocks whose g slots are all valid).
        """
        if batch.num_anchors == 0:
            # A connected zero: a rank whose samples are too short for an anchor still takes part in the collective.
            return sum((parameter.sum() * 0 for parameter in self.parameters()), start=torch.zeros(())), {}
        targets = batch.targets(self.config.block_length, self.config.chain)
        h = self.block_states(batch)
        embedded = None if self.head is None else self.head.embed(targets.previous)
        m = None if self.head is None or embedded is None else self.head.latent_of(h, embedded)
        valid = targets.valid
        slot_weight = self._slot_weights(batch, valid, decay)[valid]
        loss = draft_loss(
            h[valid],
            None if m is None else m[valid],
            None if self.head is None else self.head.W2,
            self.target_head,
            self.target_head.normed(batch.last_hidden),
            targets.teacher_rows[valid],
            targets.labels[valid],
            slot_weight.to(h.dtype),
            weights,
            vocabulary=self.vocabulary,
        )
        total = loss.total
        metrics = _slot_metrics(loss, targets, slot_weight)
        if self.confidence is not None:
            logits = self.confidence(h[valid], None if embedded is None else embedded[valid])
            bce = F.binary_cross_entropy_with_logits(logits, loss.one_minus_tv.clamp(0, 1), reduction="none")
            bce_sum = (slot_weight.to(h.dtype) * bce).sum()
            total = total + weights.confidence * bce_sum
            count = slot_weight.new_tensor(len(slot_weight))
            metrics["confidence_bce"] = (bce_sum.detach().double(), slot_weight.sum())
            metrics["confidence_bias"] = ((logits.detach().sigmoid() - loss.one_minus_tv).double().sum(), count)
        metrics["loss"] = (total.detach().double(), self.denominator(batch, decay))
        return total / torch.as_tensor(denominator, dtype=total.dtype, device=total.device), metrics

    def prepare_layers(self, recompute: bool, compiled: bool) -> None:
        """Trade time for memory or the other way round: `recompute` activations in the backward; compile the feed-forward parts."""
        for layer in self.backbone.layers:
            assert isinstance(layer, Layer)
            layer.recompute = recompute
            if compiled:
                layer.mlp.compile(dynamic=True)  # attention is compiled by itself, where it gains most

    def denominator(self, batch: TrainBatch, decay: float) -> Tensor:
        """What a batch's loss is divided by, float64 scalar: the weight of its valid slots; with Eagle3 its sequences that have any."""
        valid = batch.validity(self.config.block_length, self.config.chain)
        if self.config.kind.per_sequence:
            trained = batch.anchor_sequence[valid.any(1)].unique()
            return torch.tensor(len(trained), dtype=torch.float64, device=valid.device)
        return self._slot_weights(batch, valid, decay).sum()

    def _slot_weights(self, batch: TrainBatch, valid: Tensor, decay: float) -> Tensor:
        """[A, g] float64, 0 where a slot is not trained."""
        weights = slot_weights(self.config.block_length, decay).to(valid.device) * valid
        if not self.config.kind.per_sequence:
            return weights
        counts = weights.new_zeros(len(batch.offsets) - 1, valid.shape[1]).index_add_(0, batch.anchor_sequence, valid.to(weights.dtype))
        return weights / counts[batch.anchor_sequence].clamp(min=1)

    def block_states(self, batch: TrainBatch) -> Tensor:
        """h [A, g, H] of all blocks of a batch; h[:, k] predicts the token at anchor + k + 1."""
        backend = self.attention or ("split" if batch.input_ids.device.type == "cpu" else "flex")
        return self.backbone(batch, self.target_head, backend)

    # Drafting

    def for_decoding(self) -> Drafter:
        """Hold the weights of bf16 products in bf16 from now on; it can be trained no more. Other precisions stay as they are.

        Returns:
            Itself.
        """
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Linear) and module.bf16:
                module.to(torch.bfloat16)
            elif isinstance(module, SequentialHead) and module.bf16:
                module.hold_bf16()
        self.held = self.target_head.compute_dtype == torch.bfloat16
        return self

    def new_cache(self, batch_size: int, max_length: int) -> ContextCache:
        """An empty context for `batch_size` requests of up to `max_length` positions."""
        return self.backbone.new_cache(batch_size, max_length)

    def extend_context(self, cache: ContextCache, features: Tensor, counts: Tensor, tokens: Tensor | None = None) -> None:
        """Append the first counts[b] rows of features [B, n, L * H] (right-padded) to request b's context.

        A chain also needs the tokens [B, n] at these positions.
        """
        if isinstance(self.backbone, Chain):
            if tokens is None:
                raise DrafterError("a chain's context is made of states and tokens; extend_context was given no tokens")
            self.backbone.extend(cache, features, counts, tokens, self.target_head)
        else:
            self.backbone.extend(cache, features, counts)

    def block_hidden(self, cache: ContextCache, anchor_tokens: Tensor, anchor_positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """h [B, g, H] for one block per request, attending to cached positions before anchor_positions[b] only.

        Args:
            lengths: [B] int64, draft tokens of each block where they are to be shorter than g; see `Backbone.block`.

        Raises:
            DrafterError: in a chain, whose slots come one by one (`begin_chain`).
        """
        if isinstance(self.backbone, Chain):
            raise DrafterError("a chain has no block to work out at once; use begin_chain")
        return self.backbone.block(cache, anchor_tokens, anchor_positions, self.target_head, lengths)

    def begin_chain(self, cache: ContextCache, anchor_positions: Tensor) -> ChainRun:
        """A chain of slots per request, to be stepped with the tokens at anchor, anchor + 1, ...

        Raises:
            DrafterError: this drafter works blocks out at once, or the context before an anchor is not held exactly.
        """
        if not isinstance(self.backbone, Chain):
            raise DrafterError("this drafter has no chain; use block_hidden")
        return self.backbone.begin(cache, anchor_positions, self.target_head)

    def base_logits(self, h: Tensor) -> Tensor:
        """U: h [..., H] -> [..., V], multiplier and softcap applied, the sequential head's bias not yet added. No gradient.

        -inf for tokens outside the draft vocabulary.
        """
        if self.held and h.device.type == "cpu":  # elsewhere bf16 operands give float32 results at no cost
            head = self.target_head.lm_head if self.vocabulary is None else self.vocabulary.head
            logits = self.target_head.shape_logits_(bf16_linear(h, head))
            return logits if self.vocabulary is None else self.vocabulary.widen(logits)
        if self.vocabulary is None:
            return self.target_head.logits(h, normed=True)
        flat = project(h.detach().reshape(-1, h.shape[-1]), self.vocabulary.head)
        return self.vocabulary.widen(self.target_head.shape_logits_(flat)).view(*h.shape[:-1], -1)

    def confidence_logit(self, h_k: Tensor, previous: Tensor) -> Tensor:
        """Logit of c: h_k [..., H], previous tokens [...] -> [...].

        Raises:
            DrafterError: this drafter has no confidence head.
        """
        if self.confidence is None:
            raise DrafterError("this drafter has no confidence head (config.confidence is false)")
        return self.confidence(h_k, None if self.head is None else self.head.embed(previous))

    # Checkpoints

    def trainable_state(self) -> dict[str, Tensor]:
        """Detached trainable tensors by name (never the target's)."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_trainable(self, state: dict[str, Tensor]) -> None:
        """Copy a `trainable_state` in.

        Raises:
            DrafterError: names or shapes that differ, all listed; nothing is copied then.
        """
        own = dict(self.named_parameters())
        problems = [f"missing {name}" for name in sorted(own.keys() - state.keys())]
        problems += [f"unexpected {name}" for name in sorted(state.keys() - own.keys())]
        problems += [
            f"{name} has shape {list(state[name].shape)}, expected {list(own[name].shape)}"
            for name in sorted(own.keys() & state.keys())
            if state[name].shape != own[name].shape
        ]
        if problems:
            raise DrafterError("these weights are not of this drafter: " + "; ".join(problems))
        for name, parameter in own.items():
            parameter.copy_(state[name])


def _slot_metrics(loss: DraftLoss, targets: BlockTargets, slot_weight: Tensor) -> Metrics:
    valid = targets.valid
    counts = valid.sum(0).double()
    accept = torch.zeros(valid.shape, dtype=torch.float64, device=valid.device)
    accept[valid] = loss.one_minus_tv.double()
    match = torch.zeros_like(accept)
    match[valid] = loss.argmax_match.double()
    whole = valid.all(1)
    weight_total = slot_weight.sum()
    metrics = {
        **{name: (term.detach().double(), weight_total) for name, term in loss.terms.items()},
        "tau_teacher_forced": ((1 + accept[whole].cumprod(1).sum(1)).sum(), whole.sum().double()),
    }
    for k in range(valid.shape[1]):
        metrics[f"one_minus_tv@{k + 1}"] = (accept[:, k].sum(), counts[k])
        metrics[f"argmax_match@{k + 1}"] = (match[:, k].sum(), counts[k])
    return metrics
