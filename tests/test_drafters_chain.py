"""Eagle3 and MTP-1: the training-time test against a literal one, drafting against training, losses, the draft vocabulary."""

import dataclasses
import math
import warnings

import pytest
import torch
from drafters_cases import G, H, L, V, naive_chain, naive_shape, norm, tiny_config, tiny_drafter, tiny_sample, tiny_samples

from drafters import DrafterError, LossWeights, TargetFamily, default_loss_weights, pack

GEMMA = TargetFamily(norm_plus_one=True, embedding_scale=2.5, logit_softcap=4.0)
DECAY = -1 / math.log(0.8)
SMALL = (0, 2, 3, 7, 11, 12, 20, 21, 22, 30, 38)
CHAINS = {
    "eagle3": tiny_config(layout="chain"),
    "eagle3, window": tiny_config(layout="chain", window=3, qk_norm=False),
    "mtp1": tiny_config(layout="chain", algorithm="mtp1"),
}


def case(name="eagle3", family=None, attention="split", **changes):
    config = dataclasses.replace(CHAINS[name], **changes)
    return tiny_drafter(config, family=family or GEMMA, attention=attention), *tiny_samples(all_rows=config.algorithm == "mtp1")


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("attention", ["split", "sdpa", "flex"])
def test_slots_equal_a_training_time_test_over_all_rows(name, attention):
    drafter, samples, anchors = case(name, attention=attention)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h = drafter.block_states(pack(samples, anchors))
    block = 0
    for sample, chosen in zip(samples, anchors, strict=True):
        naive = naive_chain(drafter, sample)
        for a in chosen.tolist():
            for k in range(drafter.config.block_length):
                if a > 0 and a + k < len(sample.input_ids):
                    torch.testing.assert_close(h[block, k], naive[a - 1, k], rtol=1e-8, atol=1e-9)
            block += 1
    assert block == len(h) == 10


@pytest.mark.parametrize("name", CHAINS)
def test_drafting_gives_the_trained_logits_slot_by_slot(name):
    drafter, samples, anchors = case(name)
    batch = pack(samples, anchors)
    with torch.no_grad():
        trained = drafter.block_states(batch)
        width = H if name == "mtp1" else L * H
        for block in range(batch.num_anchors):
            sequence, anchor = int(batch.anchor_sequence[block]), int(batch.positions[batch.anchors[block]])
            if anchor == 0:
                continue
            # Request 1 is the block's; request 0 has another length. Appended in ragged pieces, as decoding does.
            cache = drafter.new_cache(2, 20)
            sample = samples[sequence]
            states = sample.last_hidden if name == "mtp1" else sample.context.transpose(0, 1).flatten(1)
            features = torch.zeros(2, 20, width, dtype=torch.float64)
            features[:, : len(states)] = states
            tokens = torch.zeros(2, 20, dtype=torch.int64)
            tokens[:, : len(states)] = sample.input_ids
            done = torch.zeros(2, dtype=torch.int64)
            for counts in (torch.tensor([1, min(anchor, 2)]), torch.tensor([0, (anchor - 2) // 2]), torch.tensor([1, anchor])):
                counts = torch.minimum(counts, torch.tensor([2, anchor]) - done).clamp(min=0)
                pieces = [torch.stack([part[b].roll(-int(done[b]), 0) for b in range(2)]) for part in (features, tokens)]
                drafter.extend_context(cache, pieces[0], counts, pieces[1])
                done = done + counts
            assert cache.lengths.tolist() == [2, anchor]
            chain = drafter.begin_chain(cache, cache.lengths)
            for k in range(drafter.config.block_length):
                if anchor + k < len(sample.input_ids):
                    h = chain.step(torch.stack([sample.input_ids[2 + k], sample.input_ids[anchor + k]]))[1]
                    torch.testing.assert_close(h, trained[block, k], rtol=1e-9, atol=1e-10)
                    torch.testing.assert_close(drafter.base_logits(h), drafter.base_logits(trained[block, k]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CHAINS)
def test_a_slot_sees_no_state_at_or_after_its_anchor(name):
    drafter, samples, anchors = case(name)
    before = drafter.block_states(pack(samples, anchors))
    block = 0
    for s, chosen in enumerate(anchors):
        for a in chosen.tolist():
            for edge, reaches in ((a, False), (a - 1, True)):
                if edge < 0:
                    continue
                context, last = samples[s].context.clone(), samples[s].last_hidden.clone()
                context[:, edge] += 3.0
                if name == "mtp1":
                    last[edge] += 3.0 * torch.arange(H)
                other = [*samples[:s], dataclasses.replace(samples[s], context=context, last_hidden=last), *samples[s + 1 :]]
                after = drafter.block_states(pack(other, anchors))[block]
                assert torch.equal(after, before[block]) != (reaches and a > 0)
            block += 1


def naive_terms(drafter, h, teacher):
    """p_d and p_t of one slot, over the whole vocabulary."""
    head = drafter.target_head
    logits = naive_shape(h @ head.lm_head.t(), head.family)
    if drafter.config.draft_vocabulary is not None:
        outside = torch.ones(V, dtype=torch.bool)
        outside[list(drafter.config.draft_vocabulary)] = False
        logits = logits.masked_fill(outside, float("-inf"))
    p_t = naive_shape(norm(teacher, head.final_norm + 1) @ head.lm_head.t(), head.family).softmax(-1)
    return logits.log_softmax(-1), p_t


@pytest.mark.parametrize("vocabulary", [None, SMALL])
def test_eagle3_loss_is_a_mean_within_each_sequence_and_step(vocabulary):
    drafter, samples, anchors = case(draft_vocabulary=vocabulary)
    batch = pack(samples, anchors)
    loss, metrics = drafter(batch, default_loss_weights(drafter.config), DECAY, drafter.denominator(batch, DECAY))
    h, block, sequences, accept = drafter.block_states(batch), 0, [], {}
    for sample, chosen in zip(samples, anchors, strict=True):
        steps = {k: [] for k in range(G)}
        for a in chosen.tolist():
            for k in range(G):
                t = a - 1  # a position t counts at step k where loss_mask[t + k + 2]
                if t >= 0 and t + k + 2 < len(sample.input_ids) and sample.loss_mask[t + k + 2]:
                    teacher = sample.last_hidden[int((sample.last_rows == a + k).nonzero())]
                    log_p, p_t = naive_terms(drafter, h[block, k], teacher)
                    inside = log_p > float("-inf")
                    steps[k].append(-(p_t[inside] * log_p[inside]).sum())
                    accept.setdefault(k, []).append(torch.minimum(p_t, log_p.exp()).sum())
            block += 1
        if any(steps.values()):
            sequences.append(sum(0.8**k * torch.stack(values).mean() for k, values in steps.items() if values))
    naive = torch.stack(sequences).mean()
    assert len(sequences) == 3
    torch.testing.assert_close(loss, naive, rtol=1e-10, atol=1e-12)
    parameters = list(drafter.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(naive, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-11)
        assert ours.abs().sum() > 0
    for k, values in accept.items():  # the same meaning with a draft vocabulary: against all of the target's distribution
        hits, trials = metrics[f"one_minus_tv@{k + 1}"]
        torch.testing.assert_close(hits, torch.stack(values).sum().detach())
        assert trials == len(values)
    assert ("ce" in metrics) == (vocabulary is None)
    torch.testing.assert_close(metrics["loss"][0] / metrics["loss"][1], loss)


def test_a_slot_counts_where_its_own_label_is_supervised():
    samples, anchors = tiny_samples()
    # An answer after a gap of one token: a slot counts again behind one that does not.
    samples, anchors = [*samples, tiny_sample(12, [(3, 6), (7, 12)], 9)], [*anchors, torch.tensor([3, 4, 9])]
    batch = pack(samples, anchors)
    valid = batch.validity(G, chain=True)
    block, jumped = 0, 0
    for sample, chosen in zip(samples, anchors, strict=True):
        for a in chosen.tolist():
            for k in range(G):
                supervised = a + k + 1 < len(sample.input_ids) and bool(sample.loss_mask[a + k + 1])
                assert bool(valid[block, k]) == (supervised and a > 0)
                jumped += bool(valid[block, k]) and not batch.validity(G)[block, k]
            block += 1
    assert jumped > 0


def test_mtp1_loss_is_the_cross_entropy_of_the_token_after_next():
    drafter, samples, anchors = case("mtp1")
    batch = pack(samples, anchors)
    loss, metrics = drafter(batch, default_loss_weights(drafter.config), 4.0, drafter.denominator(batch, 4.0))
    terms = []
    for sample, chosen in zip(samples, anchors, strict=True):
        naive = naive_chain(drafter, sample)
        for a in chosen.tolist():
            if a > 0:
                logits = naive_shape(naive[a - 1, 0] @ drafter.target_head.lm_head.t(), GEMMA)
                terms.append(torch.nn.functional.cross_entropy(logits, sample.input_ids[a + 1]))
    torch.testing.assert_close(loss.detach(), torch.stack(terms).mean(), rtol=1e-9, atol=1e-10)
    assert metrics["tau_teacher_forced"][1] == len(terms)
    assert {name for name in metrics if "@" in name} == {"one_minus_tv@1", "argmax_match@1"}


def test_mtp1_says_which_cache_it_needs():
    drafter, _, _ = case("mtp1")
    with pytest.raises(DrafterError, match=r"cache\.last_hidden_rows=all"):
        drafter.block_states(pack(*tiny_samples()))


@pytest.mark.parametrize("name", CHAINS)
def test_ranks_and_accumulation_give_the_whole_batchs_gradient(name):
    drafter, samples, anchors = case(name)
    weights, whole = default_loss_weights(drafter.config), pack(samples, anchors)
    loss, metrics = drafter(whole, weights, DECAY, drafter.denominator(whole, DECAY))
    expected = torch.autograd.grad(loss, list(drafter.parameters()))
    parts = [pack(samples[:2], anchors[:2]), pack(samples[2:3], anchors[2:3]), pack(samples[3:], anchors[3:])]
    total = sum(drafter.denominator(part, DECAY) for part in parts)
    sums: dict[str, torch.Tensor] = {}
    grads = [torch.zeros_like(parameter) for parameter in drafter.parameters()]
    for part in parts:
        share, part_metrics = drafter(part, weights, DECAY, total)
        for grad, new in zip(grads, torch.autograd.grad(share, list(drafter.parameters())), strict=True):
            grad += new
        for key, pair in part_metrics.items():
            sums[key] = sums.get(key, 0) + torch.stack(pair)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for key, pair in metrics.items():
        torch.testing.assert_close(sums[key], torch.stack(pair), rtol=1e-10, atol=1e-10)


def test_logits_outside_the_draft_vocabulary_are_impossible():
    drafter, _, _ = case(draft_vocabulary=SMALL)
    h = torch.randn(2, 3, H, dtype=torch.float64)
    whole = drafter.target_head.logits(h, normed=True)
    narrow = drafter.base_logits(h)
    inside = torch.zeros(V, dtype=torch.bool)
    inside[list(SMALL)] = True
    # A product over fewer columns may be summed in another order.
    torch.testing.assert_close(narrow[..., inside], whole[..., inside], rtol=1e-12, atol=1e-12)
    assert bool((narrow[..., ~inside] == float("-inf")).all())
    assert not any("vocabulary" in name for name in drafter.state_dict())


def test_cross_entropy_with_a_draft_vocabulary_is_refused():
    drafter, samples, anchors = case(draft_vocabulary=SMALL)
    batch = pack(samples, anchors)
    with pytest.raises(DrafterError, match=r"train\.loss\.ce=0"):
        drafter(batch, LossWeights(confidence=0.0), 4.0, 1.0)


def test_a_few_steps_lower_the_loss():
    for name in ("eagle3", "mtp1"):
        samples, anchors = tiny_samples(torch.bfloat16, all_rows=name == "mtp1")
        drafter = tiny_drafter(CHAINS[name], dtype=torch.bfloat16)
        batch, weights = pack(samples, anchors), default_loss_weights(CHAINS[name])
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        losses = []
        for _ in range(30):
            loss, _ = drafter(batch, weights, DECAY, drafter.denominator(batch, DECAY))
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[-1] < 0.8 * losses[0]


def test_a_chains_context_must_end_at_its_anchor():
    drafter, _, _ = case()
    sample = tiny_sample(6, [(2, 6)], 0)
    features, tokens = sample.context.transpose(0, 1).flatten(1)[None], sample.input_ids[None]
    cache = drafter.new_cache(1, 6)
    with pytest.raises(DrafterError, match="given no tokens"):
        drafter.extend_context(cache, features, torch.tensor([3]))
    with pytest.raises(DrafterError, match="need the context before them"):
        drafter.begin_chain(cache, torch.tensor([1]))
    with pytest.raises(DrafterError, match="goes on after the"):
        drafter.begin_chain(cache, torch.tensor([0]))
    drafter.extend_context(cache, features, torch.tensor([3]), tokens)
    with pytest.raises(DrafterError, match="goes on after the"):
        drafter.begin_chain(cache, torch.tensor([2]))
    with pytest.raises(DrafterError, match="truncate"):
        cache.truncate(torch.tensor([2]))
    with pytest.raises(DrafterError, match="max_length 6"):
        drafter.extend_context(cache, features, torch.tensor([4]), tokens)
    with pytest.raises(DrafterError, match="begin_chain"):
        drafter.block_hidden(cache, torch.tensor([1]), torch.tensor([3]))
    with pytest.raises(DrafterError, match="block_hidden"):
        tiny_drafter().begin_chain(cache, torch.tensor([3]))
