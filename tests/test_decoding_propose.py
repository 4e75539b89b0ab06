"""Drafting with real drafters: the same blocks as from scratch, each slot from the token just chosen, the target's output untouched."""

import pytest
import torch
from decoding_cases import DRAFTERS, FAMILIES, LAYERS, PROMPTS, VOCAB, chi_square_p, greedy_reference, tiny_drafter, tiny_model
from torch.testing import assert_close

from decoding.errors import DecodingError
from decoding.loop import speculative_decode
from decoding.policies import BlockLength
from decoding.propose import propose
from decoding.sampling import RandomStreams
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget

HEADS = ["none", "markov", "gated", "rnn"]
NEW = 14


def features_of(model, tokens):
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1] for layer in LAYERS], dim=-1)


def fresh_block(model, drafter, text, anchor):
    """h [g, H] for one anchor, its context made in one go from a plain forward pass over the text before it."""
    cache = drafter.new_cache(1, anchor)
    drafter.extend_context(cache, features_of(model, text[:anchor]), torch.tensor([anchor]))
    return drafter.block_hidden(cache, torch.tensor([text[anchor]]), torch.tensor([anchor]))[0]


def naive_logits(drafter, hidden, previous):
    """[B, w, V] by the head's training form, all slots at once."""
    logits = drafter.base_logits(hidden)
    return logits if drafter.head is None else logits + drafter.head.bias(drafter.head.latent(hidden, previous))


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family, kind):
    drafter = tiny_drafter(family, kind)
    target = TransformersTarget.for_drafter(tiny_model(family), LAYERS, drafter.config)
    for batch_size in (1, 2, 5):
        generations = speculative_decode(target, drafter, PROMPTS, SamplingSettings(max_new_tokens=NEW), batch_size=batch_size)
        assert [g.tokens for g in generations] == [greedy_reference(family, tuple(p), NEW) for p in PROMPTS]
        for r in (r for g in generations for r in g.rounds):
            assert len(r.confidence) == (r.drafted if drafter.confidence is not None else 0)
            assert all(0 < c < 1 for c in r.confidence)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_shorter_blocks_leave_the_text_as_it_is(kind):
    drafter = tiny_drafter("qwen3", kind)
    target = TransformersTarget.for_drafter(tiny_model("qwen3"), LAYERS, drafter.config)
    length = min(2, drafter.config.block_length)
    generations = speculative_decode(target, drafter, PROMPTS, SamplingSettings(max_new_tokens=NEW), policy=BlockLength(length))
    assert [g.tokens for g in generations] == [greedy_reference("qwen3", tuple(p), NEW) for p in PROMPTS]
    assert {r.drafted for g in generations for r in g.rounds[:2]} == {length}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_kept_across_rounds_drafts_as_one_made_from_scratch(family, monkeypatch):
    model, drafter = tiny_model(family), tiny_drafter(family)
    blocks = []
    original = drafter.block_hidden

    def spy(cache, tokens, positions, lengths=None):
        hidden = original(cache, tokens, positions, lengths)
        assert cache.lengths.tolist() == positions.tolist()
        blocks.extend(zip(tokens.tolist(), positions.tolist(), hidden, strict=True))
        return hidden

    monkeypatch.setattr(drafter, "block_hidden", spy)
    prompts = PROMPTS[:4]
    settings = SamplingSettings(max_new_tokens=NEW, stop_ids=(greedy_reference(family, tuple(prompts[0]), NEW)[7],))  # one leaves early
    generations = speculative_decode(TransformersTarget(model, LAYERS), drafter, prompts, settings)
    texts = [prompt + g.tokens for prompt, g in zip(prompts, generations, strict=True)]
    monkeypatch.undo()
    assert len(blocks) >= 20
    for token, position, hidden in blocks:
        candidates = [text for text in texts if position < len(text) and text[position] == token]
        errors = [float((fresh_block(model, drafter, text, position) - hidden).abs().max()) for text in candidates]
        assert min(errors) < 1e-4


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 small", "mtp1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chains_context_kept_across_rounds_drafts_as_one_made_from_scratch(family, kind, monkeypatch):
    model, drafter = tiny_model(family), tiny_drafter(family, kind)
    target = TransformersTarget.for_drafter(model, LAYERS, drafter.config)
    drafted, original = [], drafter.begin_chain

    def spy(cache, positions):
        chain = original(cache, positions)
        step, slots = chain.step, []

        def stepped(tokens):
            slots.append((tokens, step(tokens)))
            return slots[-1][1]

        chain.step = stepped
        drafted.append((positions, slots))
        return chain

    monkeypatch.setattr(drafter, "begin_chain", spy)
    settings = SamplingSettings(max_new_tokens=NEW, stop_ids=(greedy_reference(family, tuple(PROMPTS[1]), NEW)[7],))  # one leaves early
    generations = speculative_decode(target, drafter, PROMPTS, settings)
    monkeypatch.undo()
    texts = [prompt + g.tokens for prompt, g in zip(PROMPTS, generations, strict=True)]
    checked = 0
    for positions, slots in drafted:
        for row, anchor in enumerate(positions.tolist()):
            chain = [int(tokens[row]) for tokens, _ in slots]
            errors = []
            for text in (text for text in texts if anchor < len(text) and text[anchor] == chain[0]):
                fresh = fresh_chain(model, drafter, text, anchor)
                errors.append(
                    max(float((fresh.step(torch.tensor([t]))[0] - h[row]).abs().max()) for t, (_, h) in zip(chain, slots, strict=True))
                )
            assert min(errors) < 1e-9
            checked += 1
    assert checked >= 20


def fresh_chain(model, drafter, text, anchor):
    """The slots after one anchor, their context made in one go from a plain forward pass over the text before it."""
    tokens = torch.tensor([text[:anchor]])
    if drafter.config.algorithm == "mtp1":  # Hugging Face gives the last state normed; the last layer's own output is what is wanted
        states = []
        hook = model.model.layers[-1].register_forward_hook(lambda module, args, output: states.append(output))
        features_of(model, text[:anchor])
        hook.remove()
        features = states[0] if isinstance(states[0], torch.Tensor) else states[0][0]
    else:
        features = features_of(model, text[:anchor])
    cache = drafter.new_cache(1, anchor)
    drafter.extend_context(cache, features, torch.tensor([anchor]), tokens)
    return drafter.begin_chain(cache, torch.tensor([anchor]))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_slot_knows_the_token_just_chosen(head, temperature):
    drafter = tiny_drafter("qwen3", head)
    cache = drafter.new_cache(3, 8)
    features = torch.randn(3, 6, len(LAYERS) * 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    anchors = torch.tensor([6, 3, 5])
    drafter.extend_context(cache, features, anchors)
    tokens = torch.tensor([9, 2, 44])
    hidden = drafter.block_hidden(cache, tokens, anchors)
    for seed in range(5):
        block = propose(drafter, cache, tokens, anchors, 3, SamplingSettings(temperature), RandomStreams(seed, range(3)))
        previous = torch.cat([tokens[:, None], block.tokens[:, :-1]], dim=1)
        logits = naive_logits(drafter, hidden[:, :3], previous)
        assert_close(block.confidence, torch.sigmoid(drafter.confidence_logit(hidden[:, :3], previous)).detach())
        if temperature:
            assert_close(block.probs, torch.softmax(logits.detach(), dim=-1))
        else:
            assert block.probs is None
            assert block.tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["none", "markov", "zlab"])
def test_a_shorter_block_is_what_a_drafter_of_that_block_length_makes(kind):
    """Whatever lengths the other requests of the batch have; and it is another one than the first slots of a whole block."""
    model, drafter = tiny_model("qwen3"), tiny_drafter("qwen3", kind)
    tokens, anchors = torch.tensor([9, 4, 17, 30]), torch.tensor([4, 1, 9, 2])
    cache = drafter.new_cache(4, 9)
    texts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3]]
    features = torch.nn.utils.rnn.pad_sequence([features_of(model, text)[0] for text in texts], batch_first=True)
    drafter.extend_context(cache, features, anchors)
    lengths = torch.tensor([2, 4, 1, 3])
    mixed = drafter.block_hidden(cache, tokens, anchors, lengths)
    for row, length in enumerate(lengths.tolist()):
        own = tiny_drafter("qwen3", kind, block_length=length)
        own.load_trainable(drafter.trainable_state())
        expected = own.block_hidden(cache, tokens, anchors)[row]
        assert_close(mixed[row, :length], expected)
        same = drafter.block_hidden(cache, tokens, anchors, torch.full((4,), length))[row]
        assert_close(same, expected)
        whole = drafter.block_hidden(cache, tokens, anchors)[row, :length]
        assert torch.allclose(whole, expected) == (length == 4)


def test_drafted_blocks_follow_the_chain_of_the_head():
    vocab, rollouts = 4, 50_000
    drafter = tiny_drafter("llama", "rnn", block_length=3, vocab=vocab)
    with torch.inference_mode():
        cache = drafter.new_cache(rollouts, 1)
        features = torch.randn(1, 1, len(LAYERS) * 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        anchor, position = torch.full((rollouts,), 2), torch.ones(rollouts, dtype=torch.int64)
        drafter.extend_context(cache, features.expand(rollouts, -1, -1), position)
        tokens = propose(drafter, cache, anchor, position, 3, SamplingSettings(1.0), RandomStreams(0, range(rollouts))).tokens
        paths = torch.cartesian_prod(*[torch.arange(vocab)] * 3)
        previous = torch.cat([torch.full((len(paths), 1), 2), paths[:, :-1]], dim=1)
        hidden = drafter.block_hidden(cache, anchor, position)[:1].expand(len(paths), -1, -1)
        joint = torch.log_softmax(naive_logits(drafter, hidden, previous), dim=-1).gather(2, paths[..., None]).sum((1, 2)).exp()
    observed = torch.bincount((tokens * torch.tensor([vocab**2, vocab, 1])).sum(1), minlength=vocab**3)
    assert chi_square_p(observed, joint) > 1e-3


@pytest.mark.parametrize("kind", ["none", "rnn", "eagle3", "mtp1"])
def test_a_request_draws_the_same_tokens_in_any_batch(kind):
    drafter = tiny_drafter("gemma3", kind)
    target = TransformersTarget.for_drafter(tiny_model("gemma3"), LAYERS, drafter.config)
    settings = SamplingSettings(temperature=0.8, max_new_tokens=NEW, stop_ids=(3,), seed=5, top_p=0.9, top_k=30)
    whole = speculative_decode(target, drafter, PROMPTS, settings)
    for batch_size in (1, 2):
        assert [g.tokens for g in speculative_decode(target, drafter, PROMPTS, settings, batch_size=batch_size)] == [
            g.tokens for g in whole
        ]
    alone = speculative_decode(target, drafter, PROMPTS[3:4], settings, request_ids=[3])
    assert (alone[0].tokens, [r.accepted for r in alone[0].rounds]) == (whole[3].tokens, [r.accepted for r in whole[3].rounds])


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 small", "mtp1"])
def test_drafted_chains_follow_their_own_tokens(kind):
    """Each slot's distribution is the chain's, given the tokens just drawn; and the draws follow it."""
    vocab, rollouts = 6, 30_000
    drafter = tiny_drafter("llama", kind, block_length=2, vocab=vocab)
    width = drafter.config.block_length
    with torch.inference_mode():
        cache = drafter.new_cache(rollouts, 2)
        features = torch.randn(1, 2, drafter.config.captured_layers * 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        anchor, position = torch.full((rollouts,), 2), torch.full((rollouts,), 2)
        text = torch.tensor([[3, 1]]).expand(rollouts, -1)
        drafter.extend_context(cache, features.expand(rollouts, -1, -1), position, text)
        block = propose(drafter, cache, anchor, position, width, SamplingSettings(1.0), RandomStreams(0, range(rollouts)))
        paths = torch.cartesian_prod(*[torch.arange(vocab)] * width).view(-1, width)
        small = drafter.new_cache(len(paths), 2)
        drafter.extend_context(small, features.expand(len(paths), -1, -1), position[: len(paths)], text[: len(paths)])
        chain = drafter.begin_chain(small, position[: len(paths)])
        joint, previous = torch.ones(len(paths), dtype=torch.float64), anchor[: len(paths)]
        for slot in range(width):
            probs = drafter.base_logits(chain.step(previous)).softmax(-1)
            joint, previous = joint * probs.gather(1, paths[:, slot, None])[:, 0], paths[:, slot]
    observed = torch.bincount((block.tokens * vocab ** torch.arange(width - 1, -1, -1)).sum(1), minlength=vocab**width)
    assert chi_square_p(observed, joint) > 1e-3
    assert block.confidence is None


def test_the_last_hidden_state_is_captured_before_the_final_norm():
    for family in FAMILIES:
        model = tiny_model(family)
        target = TransformersTarget(model, last_hidden=True)
        tokens = torch.tensor([PROMPTS[2]])
        states = target.forward(target.new_cache(1, 16), tokens, torch.tensor([len(PROMPTS[2])]))
        assert target.captured_states == 1
        with torch.inference_mode():
            assert_close(model.model.norm(states.features), states.hidden)
        assert not torch.allclose(states.features, states.hidden)


def test_a_drafter_of_another_target_is_refused():
    target = TransformersTarget(tiny_model("llama"), LAYERS[:2])
    with pytest.raises(DecodingError, match="captured_layers=3, the target has 2"):
        speculative_decode(target, tiny_drafter("llama"), PROMPTS, SamplingSettings(max_new_tokens=2))
    target = TransformersTarget(tiny_model("llama", vocab=VOCAB + 1), LAYERS)
    with pytest.raises(DecodingError, match="vocab_size=53, the target has 54"):
        speculative_decode(target, tiny_drafter("llama"), PROMPTS, SamplingSettings(max_new_tokens=2))
