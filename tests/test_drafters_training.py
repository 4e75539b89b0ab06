import dataclasses
import warnings

import pytest
import torch
from drafters_cases import (
    HEADS,
    G,
    H,
    L,
    V,
    naive_block,
    naive_step,
    tiny_batch,
    tiny_config,
    tiny_drafter,
    tiny_samples,
)

from drafters import DrafterError, LossWeights, TargetFamily, pack

GEMMA = TargetFamily(norm_plus_one=True, embedding_scale=2.5, logit_softcap=4.0)
VARIANTS = {
    "dspark": tiny_config(),
    "zlab": tiny_config(layout="zlab"),
    "window": tiny_config(window=3),
    "plain qk, gelu": tiny_config(qk_norm=False, activation="gelu_tanh"),
}
ALPHAS = LossWeights(0.1, 0.9, 1.0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["split", "sdpa", "flex"])
def test_blocks_equal_a_query_by_query_reference(variant, attention):
    drafter = tiny_drafter(VARIANTS[variant], attention=attention)
    samples, anchors = tiny_samples()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h = drafter.block_states(pack(samples, anchors))
    expected = [naive_block(drafter, s, a) for s, chosen in zip(samples, anchors, strict=True) for a in chosen.tolist()]
    torch.testing.assert_close(h, torch.stack(expected), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", [TargetFamily(), GEMMA])
def test_step_equals_the_papers_formulas_slot_by_slot(head, family):
    drafter = tiny_drafter(tiny_config(head), family=family)
    samples, anchors = tiny_samples()
    batch = pack(samples, anchors)
    loss, metrics = drafter(batch, ALPHAS, 4.0, drafter.denominator(batch, 4.0))
    total, weight = naive_step(drafter, samples, anchors, (0.1, 0.9, 1.0), 4.0)
    torch.testing.assert_close(drafter.denominator(batch, 4.0), weight)
    torch.testing.assert_close(loss, total / weight, rtol=1e-10, atol=1e-12)
    names = [name for name, _ in drafter.named_parameters()]
    ours = torch.autograd.grad(loss, list(drafter.parameters()))
    theirs = torch.autograd.grad(total / weight, list(drafter.parameters()))
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
        assert a.abs().sum() > 0, name
    numerator, denominator = metrics["loss"]
    torch.testing.assert_close(numerator / denominator, loss)


def test_confidence_without_the_markov_feature():
    drafter = tiny_drafter(tiny_config("gated", confidence_markov=False))
    samples, anchors = tiny_samples()
    batch = pack(samples, anchors)
    total, weight = naive_step(drafter, samples, anchors, (0.1, 0.9, 1.0), 4.0)
    torch.testing.assert_close(drafter(batch, ALPHAS, 4.0, drafter.denominator(batch, 4.0))[0], total / weight)


@pytest.mark.parametrize("config", [tiny_config(head) for head in HEADS] + [tiny_config(layout="zlab"), tiny_config(window=3)])
def test_drafting_gives_the_trained_logits_slot_by_slot(config):
    drafter = tiny_drafter(config, family=GEMMA)
    samples, anchors = tiny_samples()
    batch = pack(samples, anchors)
    with torch.no_grad():
        trained = drafter.block_states(batch)
        targets = batch.targets(G)
        latents = None if drafter.head is None else drafter.head.latent(trained, targets.previous)
        cache = drafter.new_cache(len(samples), 20)
        longest = max(len(s.input_ids) for s in samples)
        features = torch.zeros(len(samples), longest, L * H, dtype=torch.float64)
        for b, sample in enumerate(samples):
            features[b, : len(sample.input_ids)] = sample.context.transpose(0, 1).flatten(1)
        lengths = torch.tensor([len(s.input_ids) for s in samples])
        first = lengths // 2  # in two ragged pieces, as decoding appends them
        drafter.extend_context(cache, features, first)
        rest = torch.stack([features[b].roll(-int(first[b]), 0) for b in range(len(samples))])
        drafter.extend_context(cache, rest, lengths - first)
        assert torch.equal(cache.lengths, lengths)
        for block in range(batch.num_anchors):
            sequence, anchor = int(batch.anchor_sequence[block]), int(batch.positions[batch.anchors[block]])
            tokens = torch.stack([s.input_ids[0] for s in samples])
            tokens[sequence] = samples[sequence].input_ids[anchor]
            positions = torch.zeros(len(samples), dtype=torch.int64)
            positions[sequence] = anchor
            h = drafter.block_hidden(cache, tokens, positions)[sequence]
            torch.testing.assert_close(h, trained[block], rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(drafter.base_logits(h), drafter.base_logits(trained)[block], rtol=1e-9, atol=1e-9)
            if drafter.head is None or latents is None:
                continue
            state = drafter.head.begin(1)
            for k in range(G):
                previous = targets.previous[block, k][None]
                m, state = drafter.head.step(h[k][None], previous, state)
                torch.testing.assert_close(m[0], latents[block, k], rtol=1e-9, atol=1e-10)
                torch.testing.assert_close(drafter.head.bias(m)[0], latents[block, k] @ drafter.head.W2, rtol=1e-9, atol=1e-10)
                if drafter.confidence is not None:
                    together = drafter.confidence_logit(trained, targets.previous)[block, k]
                    torch.testing.assert_close(drafter.confidence_logit(h[k][None], previous)[0], together, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attention", ["split", "sdpa"])
def test_a_block_sees_nothing_at_or_after_its_anchor(attention):
    drafter = tiny_drafter(attention=attention)
    samples, anchors = tiny_samples()
    before = drafter.block_states(pack(samples, anchors))
    for s, chosen in enumerate(anchors):
        for index, a in enumerate(chosen.tolist()):
            context = samples[s].context.clone()
            context[:, a:] = 1000.0
            other = drafter.block_states(pack([*samples[:s], dataclasses.replace(samples[s], context=context), *samples[s + 1 :]], anchors))
            block = sum(len(c) for c in anchors[:s]) + index
            assert torch.equal(other[block], before[block])
            if a > 0:  # and what lies before does reach it
                context = samples[s].context.clone()
                context[:, a - 1] += 1.0
                changed = pack([*samples[:s], dataclasses.replace(samples[s], context=context), *samples[s + 1 :]], anchors)
                assert not torch.allclose(drafter.block_states(changed)[block], before[block])


def test_blocks_of_one_batch_do_not_see_each_other():
    drafter = tiny_drafter()
    samples, anchors = tiny_samples()
    together = drafter.block_states(pack(samples, anchors))
    alone = [drafter.block_states(pack([s], [c])) for s, c in zip(samples, anchors, strict=True) if len(c)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_ranks_and_accumulation_give_the_whole_batchs_gradient(head):
    """4 micro-batches, one without any anchor, as 2 ranks x 2 accumulation steps would hold them."""
    drafter = tiny_drafter(tiny_config(head))
    samples, anchors = tiny_samples()
    whole = pack(samples, anchors)
    loss, metrics = drafter(whole, ALPHAS, 4.0, drafter.denominator(whole, 4.0))
    expected = torch.autograd.grad(loss, list(drafter.parameters()))
    parts = [pack([s], [c]) for s, c in zip(samples, anchors, strict=True)]
    total = sum(drafter.denominator(part, 4.0) for part in parts)
    grads = [torch.zeros_like(parameter) for parameter in drafter.parameters()]
    sums: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        share, part_metrics = drafter(part, ALPHAS, 4.0, total)
        for grad, new in zip(grads, torch.autograd.grad(share, list(drafter.parameters())), strict=True):
            grad += new
        for name, pair in part_metrics.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0)), pair, strict=True)]
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for name, pair in metrics.items():
        torch.testing.assert_close(torch.stack(sums[name]), torch.stack(pair), rtol=1e-10, atol=1e-10)


def test_metrics_mean_what_their_names_say():
    drafter = tiny_drafter()
    batch = tiny_batch()
    with torch.no_grad():
        _, metrics = drafter(batch, ALPHAS, 4.0, 1.0)
        targets, h = batch.targets(G), drafter.block_states(batch)
        logits = h @ drafter.target_head.lm_head.t() + drafter.head.latent(h, targets.previous) @ drafter.head.W2
        teacher = drafter.target_head.logits(batch.last_hidden[targets.teacher_rows])
    accept = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    for k in range(G):
        valid = targets.valid[:, k]
        torch.testing.assert_close(metrics[f"one_minus_tv@{k + 1}"][0], accept[valid, k].sum())
        assert metrics[f"one_minus_tv@{k + 1}"][1] == valid.sum()
        assert metrics[f"argmax_match@{k + 1}"][0] == (logits.argmax(-1) == teacher.argmax(-1))[valid, k].sum()
    whole = [b for b in range(batch.num_anchors) if targets.valid[b].all()]
    tau = sum(1 + sum(accept[b, : k + 1].prod() for k in range(G)) for b in whole)
    torch.testing.assert_close(metrics["tau_teacher_forced"][0], tau)
    assert metrics["tau_teacher_forced"][1] == len(whole)


def test_bf16_step_is_close_to_float32_and_keeps_float32_gradients():
    exact, rounded = tiny_drafter(dtype=torch.float32), tiny_drafter(dtype=torch.bfloat16)
    batch = tiny_batch(torch.bfloat16)
    results = []
    for drafter in (exact, rounded):
        loss, _ = drafter(batch, ALPHAS, 4.0, drafter.denominator(batch, 4.0))
        loss.backward()
        results.append(loss)
    torch.testing.assert_close(results[1], results[0], rtol=0.03, atol=0)
    for (name, a), b in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert b.dtype == b.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 0.2 * a.grad.norm(), name
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # the process-wide switch is put back


@pytest.mark.parametrize("config", [*(tiny_config(head) for head in HEADS), tiny_config(layout="zlab"), tiny_config(layout="chain")])
def test_held_for_decoding_a_drafter_says_nearly_the_same(config):
    """In bf16 its weights take half the bytes and its logits are off by rounding; in other precisions nothing changes at all."""

    def said(drafter):
        cache = drafter.new_cache(2, 5)
        features = torch.randn(2, 4, L * H, generator=torch.Generator().manual_seed(1))
        tokens, starts = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]]), torch.tensor([4, 2])
        drafter.extend_context(cache, features, starts, tokens)
        if drafter.config.chain:
            chain = drafter.begin_chain(cache, starts)
            return torch.stack([drafter.base_logits(chain.step(torch.tensor([k + 1, k + 2]))) for k in range(G)], dim=1)
        hidden = drafter.block_hidden(cache, torch.tensor([1, 2]), starts)
        logits = drafter.base_logits(hidden)
        return logits if drafter.head is None else logits + drafter.head.bias(drafter.head.latent(hidden, tokens))

    with torch.inference_mode():
        exact = said(tiny_drafter(config, torch.float32))
        held = tiny_drafter(config, torch.bfloat16).for_decoding()
        assert (said(held) - exact).norm() < 0.03 * exact.norm()
        assert torch.equal(said(tiny_drafter(config, torch.float32).for_decoding()), exact)
    dtypes = {name: parameter.dtype for name, parameter in held.named_parameters()}
    assert not any(parameter.requires_grad for parameter in held.parameters())
    for name, dtype in dtypes.items():
        rows_only = "norm" in name or name.startswith(("confidence", "head.W1"))
        assert dtype == (torch.float32 if rows_only else torch.bfloat16), name


def test_a_few_steps_lower_the_loss():
    drafter = tiny_drafter(dtype=torch.bfloat16)
    batch = tiny_batch(torch.bfloat16)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss, _ = drafter(batch, ALPHAS, 4.0, drafter.denominator(batch, 4.0))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_context_cache_limits():
    drafter = tiny_drafter()
    cache = drafter.new_cache(2, 5)
    features = torch.randn(2, 4, L * H, dtype=torch.float64)
    drafter.extend_context(cache, features, torch.tensor([4, 2]))
    with pytest.raises(DrafterError, match="max_length 5"):
        drafter.extend_context(cache, features, torch.tensor([2, 2]))
    with pytest.raises(DrafterError, match=r"hold|need"):
        drafter.block_hidden(cache, torch.tensor([1, 1]), torch.tensor([4, 3]))
    with pytest.raises(DrafterError, match="truncate"):
        cache.truncate(torch.tensor([4, 3]))
    with pytest.raises(DrafterError, match="do not fit"):
        drafter.extend_context(cache, features[..., :-1], torch.tensor([1, 1]))
    once = drafter.block_hidden(cache, torch.tensor([1, 2]), torch.tensor([2, 1]))
    cache.truncate(torch.tensor([2, 1]))
    drafter.extend_context(cache, torch.randn_like(features), torch.tensor([3, 3]))
    assert torch.equal(drafter.block_hidden(cache, torch.tensor([1, 2]), torch.tensor([2, 1])), once)


def test_no_confidence_head_is_said():
    drafter = tiny_drafter(tiny_config(layout="zlab"))
    with pytest.raises(DrafterError, match="no confidence head"):
        drafter.confidence_logit(torch.zeros(1, H), torch.zeros(1, dtype=torch.int64))
    assert drafter.head is None
    assert V > 0
