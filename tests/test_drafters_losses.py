import dataclasses

import pytest
import torch
from drafters_cases import H, V, naive_loss_terms, naive_shape, tiny_head

from drafters import DrafterError, LossWeights, TargetFamily
from drafters.losses import argmax, draft_loss
from drafters.vocabulary import DraftVocabulary

N, R = 11, 5
FAMILIES = {
    "plain": TargetFamily(),
    "softcap": TargetFamily(logit_softcap=3.0),
    "multiplier": TargetFamily(logit_multiplier=0.4),
    "both": TargetFamily(logit_softcap=2.0, logit_multiplier=0.7),
}


def case(dtype, markov, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    tensors = {"h": draw(N, H).requires_grad_()}
    if markov:
        tensors["m"], tensors["W2"] = draw(N, R).requires_grad_(), draw(R, V).requires_grad_()
    weights = torch.rand(N, generator=generator).to(dtype)
    weights[3] = 0
    return tensors, draw(N, H), torch.randint(0, V, (N,), generator=generator), weights


# Overlapping blocks share teacher rows; some rows are read by none.
ROWS = torch.tensor([4, 0, 4, 2, 7, 2, 4, 9, 0, 5, 7])


# What other drafters' users choose, one term at a time and all together.
OTHERS = {
    "soft_ce": LossWeights(0.0, 0.0, 0.0, soft_ce=0.7),
    "lk": LossWeights(0.0, 0.0, 0.0, lk=0.6),
    "lk_hybrid": LossWeights(0.0, 0.0, 0.0, lk_hybrid=0.9, lk_eta=2.5),
    "all": LossWeights(0.3, 0.8, 0.0, soft_ce=0.4, lk=0.5, lk_hybrid=0.6),
}


def run(tensors, head, teacher, labels, weights, alphas, chunk_rows=4, rows=ROWS, vocabulary=None):
    W2 = tensors.get("W2")
    return draft_loss(tensors["h"], tensors.get("m"), W2, head, teacher, rows, labels, weights, alphas, chunk_rows, vocabulary)


def naive_total(tensors, head, teacher, labels, weights, alphas, ids=None):
    """Full logits, a formula a line; p_d is zero outside the draft vocabulary `ids`."""
    logits = naive_shape(tensors["h"] @ head.lm_head.t(), head.family)
    if "m" in tensors:
        logits = logits + tensors["m"] @ tensors["W2"]
    if ids is not None:
        outside = torch.ones(V, dtype=torch.bool)
        outside[list(ids)] = False
        logits = logits.masked_fill(outside, float("-inf"))
    log_p, p_t = logits.log_softmax(-1), naive_shape(teacher[ROWS] @ head.lm_head.t(), head.family).softmax(-1)
    soft_ce = -(p_t * log_p.masked_fill(log_p == float("-inf"), 0)).sum(-1)
    accept = torch.minimum(p_t, log_p.exp()).sum(-1)
    blend = torch.exp(-alphas.lk_eta * accept.detach())
    loss = alphas.soft_ce * soft_ce - alphas.lk * accept.log() + alphas.lk_hybrid * (blend * soft_ce + (1 - blend) * (1 - accept))
    loss = loss + alphas.tv * (p_t - log_p.exp()).abs().sum(-1)
    if alphas.ce:
        loss = loss - alphas.ce * log_p[torch.arange(N), labels]
    return (weights * loss).sum(), accept


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_full_logits(family, markov, dtype, tolerance):
    head = tiny_head(dtype, FAMILIES[family])
    tensors, teacher, labels, weights = case(dtype, markov)
    alphas = LossWeights(0.3, 0.8)
    fused = run(tensors, head, teacher, labels, weights, alphas)
    ce, tv = naive_loss_terms(tensors["h"], tensors.get("m"), tensors.get("W2"), head, teacher[ROWS], labels)
    naive = (weights * (0.3 * ce + 0.8 * tv)).sum()
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(fused.total, naive, **close)
    torch.testing.assert_close(fused.terms["ce"], (weights * ce).sum(), **close)
    torch.testing.assert_close(fused.terms["tv"], (weights * tv).sum(), **close)
    assert set(fused.terms) == {"ce", "tv"}
    torch.testing.assert_close(fused.one_minus_tv, 1 - tv / 2, **close)
    inputs = list(tensors.values())
    for name, ours, theirs in zip(
        tensors, torch.autograd.grad(3 * fused.total, inputs), torch.autograd.grad(3 * naive, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_other_losses_equal_full_logits(others, markov, dtype, tolerance):
    head, alphas = tiny_head(dtype, FAMILIES["both"]), OTHERS[others]
    tensors, teacher, labels, weights = case(dtype, markov)
    fused = run(tensors, head, teacher, labels, weights, alphas)
    naive, accept = naive_total(tensors, head, teacher, labels, weights, alphas)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(fused.total, naive, **close)
    torch.testing.assert_close(fused.one_minus_tv, accept.detach(), **close)
    assert set(fused.terms) == {"ce", "tv", *(name for name in ("soft_ce", "lk", "lk_hybrid") if getattr(alphas, name))}
    torch.testing.assert_close(sum(getattr(alphas, name) * value for name, value in fused.terms.items()), naive.detach(), **close)
    inputs = list(tensors.values())
    for name, ours, theirs in zip(tensors, torch.autograd.grad(fused.total, inputs), torch.autograd.grad(naive, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("others", ["tv", *OTHERS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_losses_over_a_draft_vocabulary_equal_full_logits(others, dtype, tolerance):
    ids = (1, 2, 5, 8, 13, 20, 21, 33, 39)
    head, alphas = tiny_head(dtype, FAMILIES["softcap"]), {**OTHERS, "tv": LossWeights(0.0, 0.9)}[others]
    alphas = dataclasses.replace(alphas, ce=0.0)
    tensors, teacher, labels, weights = case(dtype, False)
    fused = run(tensors, head, teacher, labels, weights, alphas, vocabulary=DraftVocabulary(ids, head))
    naive, accept = naive_total(tensors, head, teacher, labels, weights, alphas, ids)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(fused.total, naive, **close)
    torch.testing.assert_close(fused.one_minus_tv, accept.detach(), **close)
    torch.testing.assert_close(*torch.autograd.grad(fused.total, tensors["h"]), *torch.autograd.grad(naive, tensors["h"]), **close)
    logits, best = tensors["h"] @ head.lm_head[list(ids)].t(), (teacher[ROWS] @ head.lm_head.t()).argmax(1)
    assert torch.equal(fused.argmax_match, torch.tensor(ids)[logits.argmax(1)] == best)


def test_a_draft_vocabulary_takes_no_cross_entropy_and_no_sequential_head():
    head = tiny_head()
    for markov, alphas in ((False, LossWeights()), (True, LossWeights(ce=0.0))):
        tensors, teacher, labels, weights = case(torch.float64, markov)
        with pytest.raises(DrafterError, match="draft vocabulary"):
            run(tensors, head, teacher, labels, weights, alphas, vocabulary=DraftVocabulary((1, 2), head))


def test_lk_is_exact_where_hardly_anything_is_accepted():
    """There 1 - TV1 / 2 is all rounding in float32, and so would be what is divided by it."""
    grads = {}
    for dtype in (torch.float32, torch.float64):
        head, alphas = tiny_head(dtype), LossWeights(0.0, 0.0, 0.0, lk=1.0)
        tensors, teacher, labels, weights = case(torch.float64, False)
        tensors = {"h": (5.5 * tensors["h"].detach()).to(dtype).requires_grad_()}
        loss = run(tensors, head, 4 * teacher.to(dtype), labels, weights.to(dtype), alphas)
        assert loss.one_minus_tv.min() < 1e-6
        grads[dtype] = torch.autograd.grad(loss.total, tensors["h"])[0].double()
    naive, _ = naive_total(tensors, head, 4 * teacher, labels, weights, alphas)
    torch.testing.assert_close(grads[torch.float64], *torch.autograd.grad(naive, tensors["h"]), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(grads[torch.float32], grads[torch.float64], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_finite_differences(family):
    # Not the hybrid, whose blend is taken as a constant.
    head, alphas = tiny_head(torch.float64, FAMILIES[family]), LossWeights(0.2, 0.5, soft_ce=0.5, lk=0.4)
    tensors, teacher, labels, weights = case(torch.float64, True, scale=0.4)

    def total(h, m, W2):
        return draft_loss(h, m, W2, head, teacher, ROWS, labels, weights, alphas, 3).total

    assert torch.autograd.gradcheck(total, tuple(tensors.values()), eps=1e-7, atol=1e-6)


def test_chunk_size_changes_nothing():
    head = tiny_head()
    results = []
    for rows in (1, 4, 100):
        tensors, teacher, labels, weights = case(torch.float64, True)
        loss = run(tensors, head, teacher, labels, weights, LossWeights(), rows)
        results.append([loss.total, loss.one_minus_tv, *torch.autograd.grad(loss.total, list(tensors.values()))])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_gradient_is_computed_where_none_is_asked_for():
    head = tiny_head()
    tensors, teacher, labels, weights = case(torch.float64, True)
    with_grads = run(tensors, head, teacher, labels, weights, LossWeights())
    with torch.no_grad():
        without = run(tensors, head, teacher, labels, weights, LossWeights())
    assert not without.total.requires_grad
    assert not with_grads.one_minus_tv.requires_grad
    torch.testing.assert_close(with_grads.total, without.total)


def test_a_drafter_that_equals_its_target_has_no_distance():
    head = tiny_head()
    tensors, _, labels, weights = case(torch.float64, False)
    loss = run(tensors, head, tensors["h"].detach(), labels, weights, LossWeights(ce=0.0, tv=1.0), rows=torch.arange(N))
    assert loss.terms["tv"] < 1e-13
    torch.testing.assert_close(loss.one_minus_tv, torch.ones(N, dtype=torch.float64))
    assert loss.argmax_match.all()


def test_cross_entropy_survives_labels_of_no_probability():
    head = tiny_head(torch.float32)
    tensors, teacher, labels, weights = case(torch.float32, False, scale=60.0)
    loss = run(tensors, head, teacher, labels, weights, LossWeights())
    logits = tensors["h"].detach().double() @ head.lm_head.double().t()
    expected = (weights.double() * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()
    assert expected > 1000
    torch.testing.assert_close(loss.terms["ce"].double(), expected, rtol=1e-5, atol=1e-3)


def test_bf16_products_stay_close_to_float32():
    vocab, hidden = 1024, 64
    wide, narrow = tiny_head(torch.float32, vocab=vocab, hidden=hidden), tiny_head(torch.bfloat16, vocab=vocab, hidden=hidden)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocab, (40,), generator=generator)
    teacher, weights = 0.4 * torch.randn(40, hidden, generator=generator), torch.ones(40)
    start = [
        0.4 * torch.randn(40, hidden, generator=generator),
        torch.randn(40, 8, generator=generator),
        torch.randn(8, vocab, generator=generator),
    ]
    results = []
    for head in (wide, narrow):
        inputs = [tensor.clone().requires_grad_() for tensor in start]
        loss = draft_loss(*inputs, head, teacher, torch.arange(40), labels, weights, LossWeights(0.5, 0.5))
        results.append((loss, torch.autograd.grad(loss.total, inputs)))
    (exact, exact_grads), (rounded, rounded_grads) = results
    assert rounded.total.dtype == torch.float32
    torch.testing.assert_close(rounded.total, exact.total, rtol=5e-3, atol=0)
    assert (rounded.one_minus_tv - exact.one_minus_tv).abs().max() < 0.01
    for ours, theirs in zip(rounded_grads, exact_grads, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("width", [512, 1536, 700])
def test_blocked_argmax_is_the_first_largest(width):
    x = torch.randint(0, 50, (20, width), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(argmax(x), torch.tensor([row.tolist().index(row.max()) for row in x]))
