"""DSpark's loss on logits that never exist whole: cross entropy and total variation per row chunk, gradients in closed form.

Per slot, with base logits U (multiplier and softcap applied), z = U + m W2, p = softmax(z), t = softmax of the teacher's logits:

    CE  = logsumexp(z) - z[label]                      dCE/dz = p - onehot(label)
    TV1 = ||p - t||_1 = sum_v |p_v - t_v|              dTV1/dz = p * (s - sum_v s_v p_v),  s = sign(p - t)

Adding a constant to s changes nothing, so s + 1 = 2 [p > t] serves: with q = p [p > t] and S = sum_v q_v, dTV1/dz = 2 (q - S p).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.precision import bf16_operands, project
from drafters.target_head import TargetHead

# Two float32 buffers of chunk x vocabulary are held at a time; this many bytes for both.
_CHUNK_BYTES = 64 * 2**20
# Rows whose softmax and gradient are worked out together on the CPU: few enough that they stay in the second-level cache between passes.
_CACHE_ROWS = 8


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms (released DSpark configurations: 0.1, 0.9, 1.0)."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0


def default_loss_weights(config: DrafterConfig) -> LossWeights:
    """The weights an algorithm was published with: DSpark's three terms, DFlash's cross entropy alone."""
    if config.algorithm == "dflash":
        return LossWeights(ce=1.0, tv=0.0, confidence=0.0)
    return LossWeights(confidence=1.0 if config.confidence else 0.0)


@dataclass(frozen=True)
class DraftLoss:
    """Sums over the N slots, not yet divided by any denominator.

    Attributes:
        total: scalar, alphas.ce * ce + alphas.tv * tv; the only one that carries a gradient.
        ce, tv: scalars, the weighted sums of CE and ||p_d - p_t||_1.
        one_minus_tv: [N], 1 - ||p_d - p_t||_1 / 2, the chance that a token drawn from p_d is accepted.
        argmax_match: [N] bool, drafter and teacher agree on the most likely token.
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    one_minus_tv: Tensor
    argmax_match: Tensor


def draft_loss(
    h: Tensor,
    m: Tensor | None,
    W2: Tensor | None,
    target_head: TargetHead,
    teacher: Tensor,
    teacher_rows: Tensor,
    labels: Tensor,
    weights: Tensor,
    alphas: LossWeights,
    chunk_rows: int | None = None,
) -> DraftLoss:
    """Cross entropy and total variation of N slots and their gradients, a row chunk at a time (DSpark paper, equations of section 3.3).

    Args:
        h: [N, H] the drafter's hidden states after its final norm.
        m, W2: [N, r] and [r, V] of the sequential head, or None for none.
        target_head: the frozen LM head; its dtype decides the products' precision, softmax is float32 or float64.
        teacher: [R, H] the target's last hidden states after its final norm.
        teacher_rows: [N] int64, each slot's row of teacher. Blocks overlap, so rows come up several times and are worked out once a chunk.
        labels: [N] int64.
        weights: [N] weight of each slot, 0 for one that does not count.
        alphas: how much of each term is in `total`.
        chunk_rows: slots at a time; by default as many as keep the logits buffers within 64 MiB.
    """
    with_grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (h, m, W2))
    rows = chunk_rows or max(1, _CHUNK_BYTES // (2 * target_head.vocab_size * h.element_size()))
    slots = _Slots(teacher, teacher_rows, labels, weights, alphas, with_grads)
    total, ce, tv, match = _ChunkedLoss.apply(h, m, W2, target_head, slots, rows)
    return DraftLoss(total, (weights * ce).sum(), (weights * tv).sum(), 1 - tv / 2, match)


@dataclass(frozen=True)
class _Slots:
    """What the loss needs to know of N slots besides the tensors that take a gradient."""

    teacher: Tensor
    teacher_rows: Tensor
    labels: Tensor
    weights: Tensor
    alphas: LossWeights
    with_grads: bool


class _ChunkedLoss(torch.autograd.Function):
    """Everything happens in the forward; the backward scales."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, m: Tensor | None, W2: Tensor | None, target_head: TargetHead, slots: _Slots, chunk_rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, with_grads = h.shape[0], slots.with_grads
        chunk_rows = max(1, min(chunk_rows, count))
        buffer = h.new_empty(2 * chunk_rows, target_head.vocab_size)
        ce, tv = h.new_empty(count), h.new_empty(count)
        match = torch.empty(count, dtype=torch.bool, device=h.device)
        grad_h = torch.empty_like(h) if with_grads else None
        grad_m = torch.empty_like(m) if with_grads and m is not None else None
        grad_W2 = torch.empty_like(W2) if with_grads and W2 is not None else None
        order = slots.teacher_rows.argsort(stable=True)
        for start in range(0, count, chunk_rows):
            rows = order[start : start + chunk_rows]
            used, local = slots.teacher_rows[rows].unique_consecutive(return_inverse=True)
            # Drafter and teacher in one product: the head's weights are read once for both.
            both = buffer[: len(rows) + len(used)]
            target_head.shape_logits_(project(torch.cat([h[rows], slots.teacher[used]]), target_head.lm_head, out=both))
            z, t = both.split([len(rows), len(used)])
            slope = _softcap_slope(z, target_head) if with_grads else None
            latent = None if m is None else m[rows]
            if latent is not None and W2 is not None:
                _product_(z, latent, W2, target_head, add=True)
            ce[rows], tv[rows], match[rows] = _rows_(z, t, local, slots.labels[rows], slots.weights[rows], slots.alphas, with_grads)
            if grad_m is not None and grad_W2 is not None and W2 is not None and latent is not None:
                grad_m[rows] = _product_(torch.empty_like(latent), z, W2.t(), target_head)
                _product_(grad_W2, latent.t(), z, target_head, add=start > 0)
            if grad_h is not None:
                grad_h[rows] = _into_head(z if slope is None else z.mul_(slope), target_head)
        ctx.grads = (grad_h, grad_m, grad_W2)
        ctx.mark_non_differentiable(ce, tv, match)
        return (slots.weights * (slots.alphas.ce * ce + slots.alphas.tv * tv)).sum(), ce, tv, match

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        scaled = [None if grad is None else grad * scale for grad in ctx.grads]
        return (*scaled, None, None, None)


def _rows_(
    z: Tensor, t: Tensor, local: Tensor, labels: Tensor, weights: Tensor, alphas: LossWeights, with_grads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """CE, TV1 and argmax agreement of a chunk: logits z [n, V], the teacher's t [u, V], and each row's teacher [n].

    z becomes the gradient of the weighted loss, t the teacher's probabilities.
    """
    step = _CACHE_ROWS if z.device.type == "cpu" else max(z.shape[0], 1)
    for few in t.split(step):
        few.sub_(few.amax(1, keepdim=True)).exp_().div_(few.sum(1, keepdim=True))
    teacher_best = argmax(t)[local]
    scratch = [torch.empty_like(z[:step]) for _ in range(3)]
    results = []
    for start in range(0, z.shape[0], step):
        rows = slice(start, start + step)
        p, q, difference = (buffer[: z[rows].shape[0]] for buffer in scratch)
        torch.index_select(t, 0, local[rows], out=q)
        results.append(_few_rows_(z[rows], p, q, difference, labels[rows], weights[rows], alphas, with_grads))
    ce, tv, best = (torch.cat(column) for column in zip(*results, strict=True))
    return ce, tv, best == teacher_best


def _few_rows_(
    z: Tensor, p: Tensor, q: Tensor, difference: Tensor, labels: Tensor, weights: Tensor, alphas: LossWeights, with_grads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """CE, TV1 and the drafter's argmax of a few rows: logits z, the teacher's probabilities q; p and difference are scratch."""
    torch.softmax(z, 1, out=p)
    best = argmax(p)
    picked, top = labels[:, None], best[:, None]
    # The largest probability is exp(its logit - logsumexp): no further pass over the vocabulary is needed for the cross entropy.
    ce = (z.gather(1, top) - p.gather(1, top).log() - z.gather(1, picked)).squeeze(1)
    torch.sub(p, q, out=difference)
    if with_grads:
        torch.ops.aten.threshold_backward.grad_input(p, difference, 0.0, grad_input=q)  # q = p [p > t] in one pass
        above = q.sum(1)
        torch.mul(p, (weights * (alphas.ce - 2 * alphas.tv * above))[:, None], out=z)
        z.addcmul_(q, (2 * alphas.tv * weights)[:, None])
        z.scatter_add_(1, picked, (-alphas.ce * weights)[:, None])
    return ce, difference.abs_().sum(1), best


def argmax(x: Tensor) -> Tensor:
    """[N, V] -> [N], the first largest entry: by blocks of 512, since torch's argmax is slow on the CPU and its maximum is not."""
    rows, width = x.shape
    if width % 512:
        return x.argmax(1)
    blocks = x.view(rows, width // 512, 512)
    best = blocks.amax(2).argmax(1)
    return best * 512 + blocks[torch.arange(rows, device=x.device), best].argmax(1)


def _softcap_slope(u: Tensor, target_head: TargetHead) -> Tensor | None:
    """d(shaped logits)/d(raw logits) from the shaped ones: multiplier * (1 - (u / c)^2), or None where it is the identity."""
    family = target_head.family
    if family.logit_softcap is not None:
        return u.div(family.logit_softcap).square_().neg_().add_(1).mul_(family.logit_multiplier)
    if family.logit_multiplier != 1.0:
        return u.new_tensor(family.logit_multiplier)
    return None


def _into_head(grad: Tensor, target_head: TargetHead) -> Tensor:
    """grad [n, V] @ lm_head [V, H]."""
    weight = target_head.lm_head
    return grad @ weight if weight.dtype == grad.dtype else (grad.to(weight.dtype) @ weight).to(grad.dtype)


def _product_(out: Tensor, a: Tensor, b: Tensor, target_head: TargetHead, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b, at the head's precision and without a temporary of out's size on the CPU."""
    if target_head.compute_dtype == torch.bfloat16 and out.device.type != "cpu":
        product = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=out.dtype)
        return out.add_(product) if add else out.copy_(product)
    with bf16_operands() if target_head.compute_dtype == torch.bfloat16 else nullcontext():
        # beta = 0 ignores what out holds, NaN included.
        return out.addmm_(a, b, beta=1 if add else 0)
