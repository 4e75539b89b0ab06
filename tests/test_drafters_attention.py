import math
import warnings

import pytest
import torch
from drafters_cases import tiny_batch

from drafters import DrafterError
from drafters.attention import plan_attention

SLOTS, HEADS, KV_HEADS, D = 3, 4, 2, 6


def naive_attention(batch, q, context_k, context_v, block_k, block_v, window):
    """One query and head at a time, over an explicit list of the keys it may see."""
    out = torch.zeros_like(q)
    for b in range(batch.num_anchors):
        start, anchor = int(batch.offsets[batch.anchor_sequence[b]]), int(batch.anchors[b])
        for j in range(SLOTS):
            seen = [p for p in range(start, anchor) if window is None or anchor + j - p < window]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                keys = torch.stack([context_k[p, kv] for p in seen] + [block_k[b, i, kv] for i in range(SLOTS)])
                values = torch.stack([context_v[p, kv] for p in seen] + [block_v[b, i, kv] for i in range(SLOTS)])
                scores = (keys @ q[b, j, head] / math.sqrt(D)).exp()
                out[b, j, head] = (scores / scores.sum()) @ values
    return out


def draw(batch, requires_grad):
    generator = torch.Generator().manual_seed(3)
    tokens, blocks = len(batch.input_ids), batch.num_anchors
    shapes = [(blocks, SLOTS, HEADS, D), *[(tokens, KV_HEADS, D)] * 2, *[(blocks, SLOTS, KV_HEADS, D)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", ["split", "sdpa"])
def test_backend_equals_the_loop_in_values_and_gradients(backend, window):
    batch = tiny_batch()
    fast, slow = draw(batch, True), draw(batch, True)
    out = plan_attention(batch, SLOTS, window, backend)(*fast)
    reference = torch.zeros_like(out) + naive_attention(batch, *slow, window)
    torch.testing.assert_close(out, reference, rtol=1e-9, atol=1e-10)
    direction = torch.randn_like(out)
    grads = torch.autograd.grad(out, fast, direction)
    expected = torch.autograd.grad(reference, slow, direction)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("window", [None, 4])
def test_flex_values_equal_the_loop(window):
    batch = tiny_batch()
    tensors = [tensor.float() for tensor in draw(batch, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that flex_attention is not compiled here
        out = plan_attention(batch, SLOTS, window, "flex")(*tensors)
    torch.testing.assert_close(out, naive_attention(batch, *tensors, window), rtol=1e-4, atol=1e-5)


def test_flex_refuses_gradients_on_the_cpu():
    batch = tiny_batch()
    with pytest.raises(DrafterError, match="no backward on the CPU"):
        plan_attention(batch, SLOTS, None, "flex")(*draw(batch, True))


def test_unknown_backend():
    with pytest.raises(DrafterError, match="split, sdpa, flex"):
        plan_attention(tiny_batch(), SLOTS, None, "fast")
