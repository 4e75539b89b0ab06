"""Drafters' losses on logits that never exist whole: every term per row chunk, gradients in closed form.

Per slot, with base logits U (multiplier and softcap applied), z = U + m W2, p = softmax(z), t = softmax of the teacher's logits, and the
overlap a = sum_v min(p_v, t_v), the chance that a token drawn from p is accepted:

    CE      = logsumexp(z) - z[label]                  dCE/dz = p - onehot(label)
    soft CE = - sum_v t_v log p_v                      d/dz   = p - t
    TV1     = ||p - t||_1 = 2 (1 - a)                  d/dz   = -2 da/dz
    LK      = - log a                                  d/dz   = -(da/dz) / a
    hybrid  = b soft CE + (1 - b) (1 - a)              b = exp(-eta a), taken as a constant

With r = p [p < t] and R = sum_v r_v, da/dz = r - R p. Soft CE is the forward KL divergence but for the teacher's entropy, which no
parameter touches. LK and the hybrid are the two losses of Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative
Decoding", arXiv 2602.23881 (there L^alpha, and L^lambda with eta = 3).

Over a draft vocabulary D the teacher keeps its probabilities, which then sum to M < 1: soft CE sums over D (d/dz = M p - t), and
TV1 = sum_D |p - t| + 1 - M.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.errors import DrafterError
from drafters.precision import bf16_operands, project
from drafters.target_head import TargetHead
from drafters.vocabulary import DraftVocabulary

# Two float32 buffers of chunk x vocabulary are held at a time; this many bytes for both.
_CHUNK_BYTES = 64 * 2**20
# Rows whose softmax and gradient are worked out together on the CPU: few enough that they stay in the second-level cache between passes.
_CACHE_ROWS = 8


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms (released DSpark configurations: ce 0.1, tv 0.9, confidence 1.0). `lk_eta` is the hybrid's eta."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    soft_ce: float = 0.0
    lk: float = 0.0
    lk_hybrid: float = 0.0
    lk_eta: float = 3.0

    @property
    def overlap(self) -> bool:
        """Whether a term needs the overlap itself, more exactly than 1 - TV1 / 2 gives it."""
        return self.lk > 0 or self.lk_hybrid > 0

    @property
    def soft(self) -> bool:
        return self.soft_ce > 0 or self.lk_hybrid > 0


def default_loss_weights(config: DrafterConfig) -> LossWeights:
    """The weights an algorithm was published with."""
    only = {"ce": 0.0, "tv": 0.0, "confidence": 0.0}
    if config.algorithm == "eagle3":
        return LossWeights(**{**only, "soft_ce": 1.0})
    if config.algorithm in ("dflash", "mtp1"):
        return LossWeights(**{**only, "ce": 1.0})
    return LossWeights(confidence=1.0 if config.confidence else 0.0)


@dataclass(frozen=True)
class DraftLoss:
    """Sums over the N slots, not yet divided by any denominator.

    Attributes:
        total: scalar, the weighted sum of all terms; the only one that carries a gradient.
        terms: name -> scalar, the slots' weighted sum of CE (not with a draft vocabulary, which may lack the label) and ||p_d - p_t||_1,
            and of soft_ce, lk and lk_hybrid where they are asked for.
        one_minus_tv: [N], 1 - ||p_d - p_t||_1 / 2, the chance that a token drawn from p_d is accepted.
        argmax_match: [N] bool, drafter and teacher agree on the most likely token.
    """

    total: Tensor
    terms: dict[str, Tensor]
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
    vocabulary: DraftVocabulary | None = None,
) -> DraftLoss:
    """The terms of N slots and their gradients, a row chunk at a time (see the module; DSpark paper, equations of section 3.3).

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
        vocabulary: what the drafter may draft, None for everything.

    Raises:
        DrafterError: the cross entropy of labels that the draft vocabulary may lack, or a sequential head with one.
    """
    if vocabulary is not None and (alphas.ce > 0 or m is not None):
        raise DrafterError("with a draft vocabulary, train on soft_ce, tv or an LK loss (train.loss.ce=0) and without a sequential head")
    with_grads = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (h, m, W2))
    rows = chunk_rows or max(1, _CHUNK_BYTES // (2 * target_head.vocab_size * h.element_size()))
    slots = _Slots(teacher, teacher_rows, labels, weights, alphas, with_grads, vocabulary)
    total, values, match = _ChunkedLoss.apply(h, m, W2, target_head, slots, rows)
    asked = {
        "ce": vocabulary is None,
        "tv": True,
        "soft_ce": alphas.soft_ce > 0,
        "lk": alphas.lk > 0,
        "lk_hybrid": alphas.lk_hybrid > 0,
    }
    terms = {name: (weights * values[index]).sum() for index, name in enumerate(_TERMS) if asked[name]}
    return DraftLoss(total, terms, 1 - values[_TERMS.index("tv")] / 2, match)


_TERMS = ("ce", "tv", "soft_ce", "lk", "lk_hybrid")


@dataclass(frozen=True)
class _Slots:
    """What the loss needs to know of N slots besides the tensors that take a gradient."""

    teacher: Tensor
    teacher_rows: Tensor
    labels: Tensor
    weights: Tensor
    alphas: LossWeights
    with_grads: bool
    vocabulary: DraftVocabulary | None


class _ChunkedLoss(torch.autograd.Function):
    """Everything happens in the forward; the backward scales."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, m: Tensor | None, W2: Tensor | None, target_head: TargetHead, slots: _Slots, chunk_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, with_grads, alphas = h.shape[0], slots.with_grads, slots.alphas
        chunk_rows = max(1, min(chunk_rows, count))
        head = target_head.lm_head if slots.vocabulary is None else slots.vocabulary.head
        buffer = h.new_empty(2 * chunk_rows, target_head.vocab_size)
        values = h.new_zeros(len(_TERMS), count)
        match = torch.empty(count, dtype=torch.bool, device=h.device)
        grad_h = torch.empty_like(h) if with_grads else None
        grad_m = torch.empty_like(m) if with_grads and m is not None else None
        grad_W2 = torch.empty_like(W2) if with_grads and W2 is not None else None
        order = slots.teacher_rows.argsort(stable=True)
        for start in range(0, count, chunk_rows):
            rows = order[start : start + chunk_rows]
            used, local = slots.teacher_rows[rows].unique_consecutive(return_inverse=True)
            z, t = _logits(h[rows], slots.teacher[used], target_head, slots.vocabulary, buffer)
            slope = _softcap_slope(z, target_head) if with_grads else None
            latent = None if m is None else m[rows]
            if latent is not None and W2 is not None:
                _product_(z, latent, W2, target_head, add=True)
            values[:, rows], match[rows] = _rows_(z, t, local, rows, slots)
            if grad_m is not None and grad_W2 is not None and W2 is not None and latent is not None:
                grad_m[rows] = _product_(torch.empty_like(latent), z, W2.t(), target_head)
                _product_(grad_W2, latent.t(), z, target_head, add=start > 0)
            if grad_h is not None:
                grad_h[rows] = _into_head(z if slope is None else z.mul_(slope), head)
        ctx.grads = (grad_h, grad_m, grad_W2)
        ctx.mark_non_differentiable(values, match)
        each = values.new_tensor([getattr(alphas, name) for name in _TERMS])
        return (slots.weights * (each @ values)).sum(), values, match

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        scaled = [None if grad is None else grad * scale for grad in ctx.grads]
        return (*scaled, None, None, None)


def _logits(
    h: Tensor, teacher: Tensor, target_head: TargetHead, vocabulary: DraftVocabulary | None, buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """Shaped logits of a chunk in `buffer`: the drafter's [n, D] and the teacher's [u, V]."""
    count, total = len(h), len(h) + len(teacher)
    if vocabulary is None:
        # Drafter and teacher in one product: the head's weights are read once for both.
        target_head.shape_logits_(project(torch.cat([h, teacher]), target_head.lm_head, out=buffer[:total]))
        return buffer[:count], buffer[count:total]
    z = buffer[:count].flatten()[: count * len(vocabulary.d2t)].view(count, -1)
    target_head.shape_logits_(project(h, vocabulary.head, out=z))
    target_head.shape_logits_(project(teacher, target_head.lm_head, out=buffer[count:total]))
    return z, buffer[count:total]


def _rows_(z: Tensor, t: Tensor, local: Tensor, slot_rows: Tensor, slots: _Slots) -> tuple[Tensor, Tensor]:
    """All terms [5, n] and argmax agreement [n] of a chunk: logits z [n, D], the teacher's t [u, V], and each row's teacher [n].

    z becomes the gradient of the weighted loss, t the teacher's probabilities.
    """
    labels, weights, vocabulary = slots.labels[slot_rows], slots.weights[slot_rows], slots.vocabulary
    step = _CACHE_ROWS if z.device.type == "cpu" else max(z.shape[0], 1)
    for few in t.split(step):
        few.sub_(few.amax(1, keepdim=True)).exp_().div_(few.sum(1, keepdim=True))
    teacher_best = argmax(t)[local]
    if vocabulary is not None:
        t, labels = t.index_select(1, vocabulary.d2t), vocabulary.t2d[labels].clamp(min=0)
    scratch = [torch.empty_like(z[:step]) for _ in range(3)]
    results = []
    for start in range(0, z.shape[0], step):
        rows = slice(start, start + step)
        p, q, difference = (buffer[: z[rows].shape[0]] for buffer in scratch)
        torch.index_select(t, 0, local[rows], out=q)
        results.append(_few_rows_(z[rows], p, q, difference, labels[rows], weights[rows], slots))
    values, best = (torch.cat(column, dim=-1) for column in zip(*results, strict=True))
    return values, (best if vocabulary is None else vocabulary.d2t[best]) == teacher_best


def _few_rows_(
    z: Tensor, p: Tensor, q: Tensor, difference: Tensor, labels: Tensor, weights: Tensor, slots: _Slots
) -> tuple[Tensor, Tensor]:
    """All terms and the drafter's argmax of a few rows: logits z, the teacher's probabilities q; p and difference are scratch."""
    alphas = slots.alphas
    torch.softmax(z, 1, out=p)
    best = argmax(p)
    picked, top = labels[:, None], best[:, None]
    # The largest probability is exp(its logit - logsumexp): no further pass over the vocabulary is needed for the cross entropy.
    total = (z.gather(1, top) - p.gather(1, top).log()).squeeze(1)
    ce = total - z.gather(1, picked).squeeze(1)
    mass: Tensor | float = 1.0 if slots.vocabulary is None else q.sum(1)
    nothing = torch.zeros_like(ce)
    soft = mass * total - torch.linalg.vecdot(q, z) if alphas.soft else nothing
    overlap = torch.minimum(p, q, out=difference).sum(1).clamp_(min=torch.finfo(p.dtype).tiny) if alphas.overlap else nothing
    blend = torch.exp(-alphas.lk_eta * overlap)
    torch.sub(q, p, out=difference)
    if slots.with_grads:
        by_soft = weights * (alphas.soft_ce + alphas.lk_hybrid * blend)
        by_overlap = weights * (2 * alphas.tv + alphas.lk_hybrid * (1 - blend) + (alphas.lk / overlap if alphas.lk else 0.0))
        if alphas.soft:
            torch.mul(q, -by_soft[:, None], out=z)
        torch.ops.aten.threshold_backward.grad_input(p, difference, 0.0, grad_input=q)  # q = r = p [p < t] in one pass
        by_p = weights * alphas.ce + by_soft * mass + by_overlap * q.sum(1)
        z = z.addcmul_(p, by_p[:, None]) if alphas.soft else torch.mul(p, by_p[:, None], out=z)
        z.addcmul_(q, -by_overlap[:, None])
        z.scatter_add_(1, picked, (-alphas.ce * weights)[:, None])
    tv = difference.abs_().sum(1) + (1 - mass)
    lk = -overlap.log() if alphas.lk else nothing
    hybrid = blend * soft + (1 - blend) * (1 - overlap) if alphas.lk_hybrid else nothing
    return torch.stack([ce, tv, soft, lk, hybrid]), best


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


def _into_head(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [n, V] @ lm_head [V, H]."""
    return grad @ weight if weight.dtype == grad.dtype else (grad.to(weight.dtype) @ weight).to(grad.dtype)


def _product_(out: Tensor, a: Tensor, b: Tensor, target_head: TargetHead, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b, at the head's precision and without a temporary of out's size on the CPU."""
    if target_head.compute_dtype == torch.bfloat16 and out.device.type != "cpu":
        product = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=out.dtype)
        return out.add_(product) if add else out.copy_(product)
    with bf16_operands() if target_head.compute_dtype == torch.bfloat16 else nullcontext():
        # beta = 0 ignores what out holds, NaN included.
        return out.addmm_(a, b, beta=1 if add else 0)
