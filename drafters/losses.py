"""DSpark's loss on logits that never exist whole: cross entropy and total variation per row chunk, gradients in closed form.

Per slot, with base logits U (multiplier and softcap applied), z = U + m W2, p = softmax(z), t = softmax of the teacher's logits:

    CE  = logsumexp(z) - z[label]                      dCE/dz = p - onehot(label)
    TV1 = ||p - t||_1 = sum_v |p_v - t_v|              dTV1/dz = p * (s - sum_v s_v p_v),  s = sign(p - t)

Adding a constant to s changes nothing, so s + 1 = 2 [p > t] serves: with q = p [p > t] and S = sum_v q_v, dTV1/dz = 2 (q - S p).
"""

from __future__ import annotations

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
_CACHE_ROWS = 4


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
        teacher: [N, H] the target's last hidden states after its final norm.
        labels: [N] int64.
        weights: [N] weight of each slot, 0 for one that does not count.
        alphas: how much of each term is in `total`.
        chunk_rows: rows at a time; by default as many as keep the logits buffers at 64 MiB.
    """
    with_grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (h, m, W2))
    rows = chunk_rows or max(1, _CHUNK_BYTES // (2 * target_head.vocab_size * h.element_size()))
    total, ce, tv, match = _ChunkedLoss.apply(h, m, W2, target_head, teacher, labels, weights, alphas, rows, with_grads)
    return DraftLoss(total, (weights * ce).sum(), (weights * tv).sum(), 1 - tv / 2, match)


class _ChunkedLoss(torch.autograd.Function):
    """Everything happens in the forward; the backward scales."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        m: Tensor | None,
        W2: Tensor | None,
        target_head: TargetHead,
        teacher: Tensor,
        labels: Tensor,
        weights: Tensor,
        alphas: LossWeights,
        chunk_rows: int,
        with_grads: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, vocab = h.shape[0], target_head.vocab_size
        chunk_rows = max(1, min(chunk_rows, count))
        buffers = [h.new_empty(chunk_rows, vocab) for _ in range(2)]
        ce, tv = h.new_empty(count), h.new_empty(count)
        match = torch.empty(count, dtype=torch.bool, device=h.device)
        grad_h = torch.empty_like(h) if with_grads else None
        grad_m = torch.empty_like(m) if with_grads and m is not None else None
        grad_W2 = torch.zeros_like(W2) if with_grads and W2 is not None else None
        for start in range(0, count, chunk_rows):
            part = slice(start, min(start + chunk_rows, count))
            z, t = (buffer[: part.stop - part.start] for buffer in buffers)
            target_head.shape_logits_(project(teacher[part], target_head.lm_head, out=t))
            target_head.shape_logits_(project(h[part], target_head.lm_head, out=z))
            slope = _softcap_slope(z, target_head) if with_grads else None
            if m is not None and W2 is not None:
                _add_product_(z, m[part], W2, target_head)
            ce[part], tv[part], match[part] = _rows_(z, t, labels[part], weights[part], alphas, with_grads)
            if grad_m is not None and grad_W2 is not None and W2 is not None and m is not None:
                grad_m[part] = _product(z, W2.t(), target_head)
                _add_product_(grad_W2, m[part].t(), z, target_head)
            if grad_h is not None:
                grad_h[part] = _into_head(z if slope is None else z.mul_(slope), target_head)
        ctx.grads = (grad_h, grad_m, grad_W2)
        ctx.mark_non_differentiable(ce, tv, match)
        return (weights * (alphas.ce * ce + alphas.tv * tv)).sum(), ce, tv, match

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        scaled = [None if grad is None else grad * scale for grad in ctx.grads]
        return (*scaled, *[None] * 7)


def _rows_(z: Tensor, t: Tensor, labels: Tensor, weights: Tensor, alphas: LossWeights, with_grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    """CE, TV1 and argmax agreement of a chunk's rows; z becomes the gradient of the weighted loss, t is used up."""
    step = _CACHE_ROWS if z.device.type == "cpu" else z.shape[0]
    p, q = torch.empty_like(z[:step]), torch.empty_like(z[:step])
    results = []
    for start in range(0, z.shape[0], step):
        rows = slice(start, start + step)
        count = z[rows].shape[0]
        results.append(_few_rows_(z[rows], t[rows], p[:count], q[:count], labels[rows], weights[rows], alphas, with_grads))
    ce, tv, match = (torch.cat(column) for column in zip(*results, strict=True))
    return ce, tv, match


def _few_rows_(
    z: Tensor, t: Tensor, p: Tensor, q: Tensor, labels: Tensor, weights: Tensor, alphas: LossWeights, with_grads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    picked = labels[:, None]
    label_logit, highest = z.gather(1, picked).squeeze(1), z.amax(1)
    torch.softmax(z, 1, out=p)
    torch.softmax(t, 1, out=q)
    # The largest probability is exp(highest - logsumexp): one cheap pass instead of another exponential one.
    ce = highest - p.amax(1).log() - label_logit
    match = argmax(p) == argmax(q)
    difference = torch.sub(p, q, out=t)
    if with_grads:
        torch.ops.aten.threshold_backward.grad_input(p, difference, 0.0, grad_input=q)  # q = p [p > t] in one pass
        above = q.sum(1)
        torch.mul(p, (weights * (alphas.ce - 2 * alphas.tv * above))[:, None], out=z)
        z.addcmul_(q, (2 * alphas.tv * weights)[:, None])
        z.scatter_add_(1, picked, (-alphas.ce * weights)[:, None])
    return ce, difference.abs_().sum(1), match


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


def _product(a: Tensor, b: Tensor, target_head: TargetHead) -> Tensor:
    """a @ b at the head's precision."""
    if target_head.compute_dtype != torch.bfloat16:
        return a @ b
    if a.device.type != "cpu":
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=a.dtype)
    with bf16_operands():
        return a @ b


def _add_product_(total: Tensor, a: Tensor, b: Tensor, target_head: TargetHead) -> None:
    """total += a @ b at the head's precision, without a temporary of total's size."""
    if target_head.compute_dtype != torch.bfloat16:
        total.addmm_(a, b)
    elif total.device.type != "cpu":
        total.add_(torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=total.dtype))
    else:
        with bf16_operands():
            total.addmm_(a, b)
