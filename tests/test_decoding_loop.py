"""Speculative decoding as a whole: exactly the target's own output, whatever the drafter and the batch."""

import pytest
import torch
from decoding_cases import (
    DRAFTERS,
    FAMILIES,
    LAYERS,
    PROMPTS,
    VOCAB,
    ScriptedDrafter,
    chi_square_p,
    greedy_reference,
    tiny_drafter,
    tiny_model,
)
from torch.testing import assert_close

from decoding.errors import DecodingError
from decoding.loop import speculative_decode
from decoding.sampling import sample
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget
from decoding.verify import Verdict, verify_sampled

NEW = 17
STOPS = [8, 38, 44, 51, 41]  # token ids


def references(family, new_tokens=NEW):
    return [greedy_reference(family, tuple(prompt), new_tokens) for prompt in PROMPTS]


def script(family, kind):
    """(request, position) -> token; `knowing` is always right, `good` mostly, `wrong` never, `random` by chance."""
    texts = [prompt + reference for prompt, reference in zip(PROMPTS, references(family), strict=True)]

    def token(request, position):
        right = texts[request][position] if position < len(texts[request]) else 0
        chance = (request * 31 + position * 7919) % 97
        return {
            "knowing": right,
            "good": right if chance % 4 else (right + 1) % VOCAB,
            "wrong": (right + 1) % VOCAB,
            "random": chance % VOCAB,
        }[kind]

    return token


def shifted(family, kind, start):
    own = script(family, kind)
    return lambda request, position: own(request + start, position)


@pytest.mark.parametrize("kind", ["none", "knowing", "good", "wrong", "random"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family, batch_size, kind):
    target = TransformersTarget(tiny_model(family), LAYERS)
    settings = SamplingSettings(max_new_tokens=NEW)
    for start in range(0, len(PROMPTS), batch_size):  # the scripts know requests by their place in one batch
        prompts = PROMPTS[start : start + batch_size]
        drafter = None if kind == "none" else ScriptedDrafter(shifted(family, kind, start), prompts=prompts)
        for offset, generation in enumerate(speculative_decode(target, drafter, prompts, settings, batch_size=batch_size)):
            assert generation.tokens == references(family)[start + offset]
            assert generation.finish_reason == "length"
            rounds = generation.rounds
            assert sum(r.committed for r in rounds) == NEW - 1
            assert all(r.committed == r.accepted + 1 for r in rounds)
            if kind == "knowing":  # 4 drafts and the bonus token each round, less where max_new_tokens comes first
                assert [r.drafted for r in rounds] == [r.accepted for r in rounds] == [4, 4, 4, 0]
            if kind in ("wrong", "none"):
                assert all(r.accepted == 0 for r in rounds)
            if kind == "none":
                assert all(r.drafted == 0 for r in rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafters_context_holds_the_hidden_states_of_the_committed_text(family):
    model = tiny_model(family)
    drafter = ScriptedDrafter(script(family, "good"))
    generations = speculative_decode(TransformersTarget(model, LAYERS), drafter, PROMPTS, SamplingSettings(max_new_tokens=NEW))
    for request, (prompt, generation) in enumerate(zip(PROMPTS, generations, strict=True)):
        features = torch.cat(drafter.caches[0].features[request])
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([prompt + generation.tokens]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
        assert len(prompt) <= len(features) < len(expected)  # all but the last round's
        assert_close(features, expected[: len(features)], atol=1e-6, rtol=1e-6)


def test_long_prompts_are_prefilled_in_pieces(monkeypatch):
    monkeypatch.setattr("decoding.loop.PREFILL_TOKENS", 15)  # three positions of five prompts
    for family in FAMILIES:
        drafter = ScriptedDrafter(script(family, "good"))
        generations = speculative_decode(
            TransformersTarget(tiny_model(family), LAYERS), drafter, PROMPTS, SamplingSettings(max_new_tokens=NEW)
        )
        assert [g.tokens for g in generations] == references(family)


@pytest.mark.parametrize("kind", ["none", "knowing", "good", "wrong"])
@pytest.mark.parametrize("stop", STOPS)
def test_nothing_after_a_stop_token(kind, stop):
    family = "qwen3"
    target = TransformersTarget(tiny_model(family), LAYERS)
    drafter = None if kind == "none" else ScriptedDrafter(script(family, kind), confidence=True)
    settings = SamplingSettings(max_new_tokens=NEW, stop_ids=(stop, VOCAB + 5))
    generations = speculative_decode(target, drafter, PROMPTS, settings)
    for generation, reference in zip(generations, references(family), strict=True):
        expected = reference[: reference.index(stop) + 1] if stop in reference else reference
        assert generation.tokens == expected
        assert generation.finish_reason == ("stop" if stop in reference else "length")
        assert len(generation.tokens) == 1 + sum(r.committed for r in generation.rounds)
        for r in generation.rounds:
            assert r.committed in (r.accepted, r.accepted + 1)
            assert len(r.confidence) == (r.drafted if kind != "none" else 0)
    if kind == "knowing":
        for generation, reference in zip(generations, references(family), strict=True):
            if stop in reference[1:] and stop != reference[0]:
                slot, last = (reference.index(stop) - 1) % 5, generation.rounds[-1]  # each round gives 4 drafts and the bonus token
                assert last.stopped_in_draft == (slot < 4)
                assert last.counted == (slot + 1 if slot < 4 else 4)


def test_the_stop_test_meets_every_place_of_a_block():
    """First, middle and last draft slot, and the bonus token, whose slot is 4."""
    stops = STOPS
    found = {(text.index(stop) - 1) % 5 for text in references("qwen3") for stop in stops if stop in text[1:] and stop != text[0]}
    assert found == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_max_new_tokens_is_exact(new_tokens, temperature):
    target = TransformersTarget(tiny_model("llama"), LAYERS)
    drafter = ScriptedDrafter(script("llama", "good"))
    settings = SamplingSettings(temperature=temperature, max_new_tokens=new_tokens)
    assert [len(g.tokens) for g in speculative_decode(target, drafter, PROMPTS, settings)] == [new_tokens] * len(PROMPTS)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_request_draws_the_same_tokens_in_any_batch(drafted):
    target = TransformersTarget(tiny_model("gemma3"), LAYERS)
    settings = SamplingSettings(temperature=1.0, max_new_tokens=NEW, stop_ids=(3,), seed=11)
    ids = [40, 7, 19, 2, 88]

    def run(rows, batch_size, seed=11):
        def token(request, position):
            return (position * 13) % VOCAB  # the same for every request, since its row may differ

        drafter = ScriptedDrafter(token, sharpness=3.0) if drafted else None
        own = SamplingSettings(temperature=1.0, max_new_tokens=NEW, stop_ids=(3,), seed=seed)
        out = speculative_decode(target, drafter, [PROMPTS[r] for r in rows], own, [ids[r] for r in rows], batch_size)
        return {row: (g.tokens, g.rounds) for row, g in zip(rows, out, strict=True)}

    together = run(range(5), 5)
    assert together == run(range(5), 2) == run(range(5), 1)
    assert together == dict(sorted(run([3, 0, 4, 1, 2], 5).items()))
    assert together[2] == run([2], 1)[2]
    other = run(range(5), 5, seed=12)
    assert sum(together[row][0] != other[row][0] for row in range(5)) >= 4
    assert settings.seed == 11


def rollouts_of(kind, rollouts, top_p=1.0, top_k=0):
    """Rollouts of the whole loop on a vocabulary of 4, and the exact joint distribution of 4 tokens.

    Returns:
        generations, how often each text came, the probability of each.
    """
    vocab, new, temperature = 4, 4, 1.5
    model = tiny_model("llama", vocab)
    drafter = None if kind == "plain" else tiny_drafter("llama", kind, block_length=2, vocab=vocab)
    target = TransformersTarget.for_drafter(model, LAYERS, drafter.config) if drafter else TransformersTarget(model, LAYERS)
    settings = SamplingSettings(temperature=temperature, max_new_tokens=new, seed=3, top_p=top_p, top_k=top_k)
    generations = speculative_decode(target, drafter, [[1]] * rollouts, settings, batch_size=10_000)
    tokens = torch.tensor([g.tokens for g in generations])
    observed = torch.bincount((tokens * vocab ** torch.arange(new - 1, -1, -1)).sum(1), minlength=vocab**new)

    paths = torch.cartesian_prod(*[torch.arange(vocab)] * new)
    with torch.inference_mode():
        logits = model(input_ids=torch.cat([torch.ones(len(paths), 1, dtype=torch.int64), paths], dim=1)).logits[:, :-1]
    logits = logits / temperature  # no longer an inference tensor: it may be written to
    for rows in logits:
        for row in rows:
            order = sorted(range(vocab), key=lambda i: -float(row[i]))
            kept = order[: top_k or vocab]
            mass = torch.softmax(row[kept], dim=0)
            while len(kept) > 1 and float(mass[: len(kept) - 1].sum()) >= top_p:  # without its last one it still holds enough
                kept = kept[:-1]
            row[[i for i in range(vocab) if i not in kept]] = float("-inf")
    steps = torch.log_softmax(logits, dim=-1).gather(2, paths[..., None]).squeeze(2)
    exact = steps.sum(1).exp()
    assert float(exact.sum()) == pytest.approx(1, abs=1e-6)
    return generations, observed, exact


CUT = [(1.0, 0), (0.9, 3)]
EVERY = ["plain", *DRAFTERS]


@pytest.mark.parametrize(
    ("kind", "top_p", "top_k"),
    [("plain", 1.0, 0), ("markov", 1.0, 0), ("eagle3", 1.0, 0), ("eagle3 small", 1.0, 0), ("mtp1", 1.0, 0), ("markov", 0.9, 3)],
)
def test_sampled_sequences_have_the_targets_distribution(kind, top_p, top_k):
    check_distribution(kind, 30_000, top_p, top_k)


@pytest.mark.slow
@pytest.mark.parametrize(("top_p", "top_k"), CUT)
@pytest.mark.parametrize("kind", EVERY)
def test_many_sampled_sequences_have_the_targets_distribution(kind, top_p, top_k, record_property):
    record_property("p_value", check_distribution(kind, 120_000, top_p, top_k))


def check_distribution(kind, rollouts, top_p, top_k):
    """The p-value of the chi-square test, which must not be small."""
    generations, observed, exact = rollouts_of(kind, rollouts, top_p, top_k)
    p_value = chi_square_p(observed, exact)
    assert p_value > 1e-3
    assert chi_square_p(observed, 0.9 * exact + 0.1 / len(exact)) < 1e-6  # the test would have seen a small error
    if kind != "plain":
        block = max(r.drafted for g in generations for r in g.rounds)  # an MTP-1 drafter has one slot
        accepted = {r.accepted for g in generations for r in g.rounds if r.drafted == block}
        assert accepted == set(range(block + 1)), "everything from a first rejection to a whole block came up"
    print(f"{kind}, top_p {top_p}, top_k {top_k}: {rollouts} rollouts, p = {p_value:.3g}")
    return p_value


def accept_too_often(tokens, counts, draft, target, accept, final):
    """Wrong: passes a token a little more often than it may."""
    return verify_sampled(tokens, counts, draft, target, 0.8 * accept, final)


def target_as_residual(tokens, counts, draft, target, accept, final):
    """Wrong: after a rejection draws from the target's own distribution."""
    accepted = verify_sampled(tokens, counts, draft, target, accept, final).accepted
    return Verdict(accepted, sample(target[(counts + 1).cumsum(0) - counts - 1 + accepted], final))


@pytest.mark.parametrize("wrong", [accept_too_often, target_as_residual])
def test_a_wrong_verifier_in_the_loop_is_caught(wrong, monkeypatch):
    monkeypatch.setattr("decoding.loop.verify_sampled", wrong)
    _, observed, exact = rollouts_of("markov", 30_000)
    assert chi_square_p(observed, exact) < 1e-6


def test_seconds_add_up():
    drafter = ScriptedDrafter(script("llama", "good"))
    target = TransformersTarget(tiny_model("llama"), LAYERS)
    for g in speculative_decode(target, drafter, PROMPTS, SamplingSettings(max_new_tokens=NEW)):
        s = g.seconds
        assert min(s.prefill, s.draft, s.verify) > 0
        assert s.prefill + s.draft + s.verify <= s.total


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {"max_new_tokens": 3}, "Prompt 1 is empty"),
        ([[1, VOCAB]], {"max_new_tokens": 3}, "another tokenizer"),
        ([[1] * 100], {"max_new_tokens": 29}, "128 positions"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompts, settings, message):
    target = TransformersTarget(tiny_model("llama"), LAYERS)
    with pytest.raises(DecodingError, match=message):
        speculative_decode(target, None, prompts, SamplingSettings(**settings))


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}, {"top_p": 0.0}, {"top_k": -1}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(DecodingError):
        SamplingSettings(**wrong)


def test_no_prompts_give_no_generations():
    assert speculative_decode(TransformersTarget(tiny_model("llama")), None, [], SamplingSettings()) == []
