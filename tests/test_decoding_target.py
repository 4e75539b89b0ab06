"""The target wrapper against Hugging Face's own forward pass."""

import pytest
import torch
from decoding_cases import FAMILIES, LAYERS, PROMPTS, tiny_model
from torch.testing import assert_close

from decoding import ragged
from decoding.errors import DecodingError
from decoding.target import TransformersTarget


def pad(sequences):
    width = max(map(len, sequences))
    return torch.tensor([s + [0] * (width - len(s)) for s in sequences]), torch.tensor([len(s) for s in sequences])


def reference(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_of_ragged_prompts_equals_each_prompt_alone(family, attention):
    model = tiny_model(family, attention=attention)
    target = TransformersTarget(model, LAYERS)
    tokens, counts = pad(PROMPTS)
    cache = target.new_cache(len(PROMPTS), 16)
    states = target.forward(cache, tokens, counts)
    logits = target.logits(states.hidden)
    assert cache.lengths.tolist() == counts.tolist()
    for row, prompt in enumerate(PROMPTS):
        out = reference(model, prompt)
        n = len(prompt)
        assert_close(logits[row, :n], out.logits[0], atol=1e-5, rtol=1e-5)
        features = torch.cat([out.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        assert_close(states.features[row, :n], features, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "each-apart"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_and_leaving_rows_equal_a_fresh_prefill(family, apart, monkeypatch):
    """Blocks of different lengths, cut back at random, rows leaving on the way: what is left behaves as if nothing had been taken back."""
    if apart:
        monkeypatch.setattr(ragged, "_KEYS_OF_A_CALL", 0)
    model = tiny_model(family)
    target = TransformersTarget(model, LAYERS)
    random = torch.Generator().manual_seed(0)
    texts = [list(p) for p in PROMPTS]
    cache = target.new_cache(len(texts), 64)
    target.forward(cache, *pad(texts))
    for step in range(8):
        block = torch.randint(0, 53, (len(texts), 5), generator=random)
        counts = torch.randint(1, 6, (len(texts),), generator=random)
        states = target.forward(cache, block, counts)
        for row in range(len(texts)):
            n = int(counts[row])
            out = reference(model, texts[row] + block[row, :n].tolist())
            assert_close(target.logits(states.hidden[row, :n]), out.logits[0, -n:], atol=1e-5, rtol=1e-5)
            assert_close(states.features[row, :n, -32:], out.hidden_states[3][0, -n:], atol=1e-6, rtol=1e-6)
        kept = [int(torch.randint(0, int(n) + 1, (1,), generator=random)) for n in counts]
        texts = [text + block[row, :n].tolist() for row, (text, n) in enumerate(zip(texts, kept, strict=True))]
        cache.truncate(torch.tensor([len(text) for text in texts]))
        if step in (2, 4):
            rows = [0, len(texts) - 1, *range(2, len(texts) - 1)]  # row 1 leaves, the last one takes its place
            texts = [texts[row] for row in rows]
            cache.select(rows)
    assert len(texts) == 3


def test_hooks_do_not_stay_on_the_model():
    model = tiny_model("llama")

    def hooks():
        return [(len(layer._forward_hooks), len(layer._forward_pre_hooks)) for layer in model.model.layers]

    before = hooks()  # transformers leaves some of its own
    target = TransformersTarget(model, LAYERS)
    assert target.forward(target.new_cache(1, 8), torch.tensor([[1, 2]]), torch.tensor([2])).features is not None
    assert target.forward(target.new_cache(1, 8), torch.tensor([[1, 2]]), torch.tensor([2]), capture=False).features is None
    assert hooks() == before


@pytest.mark.parametrize(("layers", "message"), [((3,), "outside"), ((-2,), "outside"), ((1, 0), "ascend"), ((1, 1), "ascend")])
def test_layers_that_cannot_be_captured_are_refused(layers, message):
    with pytest.raises(DecodingError, match=message):
        TransformersTarget(tiny_model("llama"), layers)


def test_a_block_larger_than_the_cache_is_refused():
    target = TransformersTarget(tiny_model("llama"))
    with pytest.raises(DecodingError, match="room for 3"):
        target.forward(target.new_cache(1, 3), torch.tensor([[1, 2, 3, 4]]), torch.tensor([2]))


def test_a_model_with_other_logits_than_its_head_gives_is_refused():
    model = tiny_model("llama", vocab=31)
    plain = model.lm_head.forward
    hook = model.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits * 2))
    try:
        with pytest.raises(DecodingError, match="not supported"):
            TransformersTarget(model)
    finally:
        hook.remove()
    assert model.lm_head.forward == plain
    TransformersTarget(model)
