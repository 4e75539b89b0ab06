import math
import warnings

import pytest
import torch
from drafters_cases import tiny_batch

from drafters import DrafterError
from drafters.attention import Slots, plan_attention

HEADS, KV_HEADS, D = 4, 2, 6
# Whole blocks, as parallel drafters ask; and the third step of a chain: one slot, the keys of three, starting before the anchor.
ASKED = {"block": Slots(3), "block, window": Slots(3, 4), "chain": Slots(1, None, 2, 3, 1), "chain, window": Slots(1, 4, 2, 3, 1)}


def naive_attention(batch, q, context_k, context_v, block_k, block_v, slots):
    """One query and head at a time, over an explicit list of the keys it may see."""
    out = torch.zeros_like(q)
    for b in range(batch.num_anchors):
        first, start = int(batch.offsets[batch.anchor_sequence[b]]), int(batch.anchors[b]) - slots.lag
        for j in range(slots.count):
            seen = [p for p in range(first, start) if slots.window is None or start + slots.first + j - p < slots.window]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                keys = torch.stack([context_k[p, kv] for p in seen] + [block_k[b, i, kv] for i in range(slots.own)])
                values = torch.stack([context_v[p, kv] for p in seen] + [block_v[b, i, kv] for i in range(slots.own)])
                scores = (keys @ q[b, j, head] / math.sqrt(D)).exp()
                out[b, j, head] = (scores / scores.sum()) @ values
    return out


def draw(batch, slots, requires_grad):
    generator = torch.Generator().manual_seed(3)
    tokens, blocks = len(batch.input_ids), batch.num_anchors
    shapes = [(blocks, slots.count, HEADS, D), *[(tokens, KV_HEADS, D)] * 2, *[(blocks, slots.own, KV_HEADS, D)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("backend", ["split", "sdpa"])
def test_backend_equals_the_loop_in_values_and_gradients(backend, asked):
    batch, slots = tiny_batch(), ASKED[asked]
    fast, slow = draw(batch, slots, True), draw(batch, slots, True)
    out = plan_attention(batch, slots, backend)(*fast)
    reference = torch.zeros_like(out) + naive_attention(batch, *slow, slots)
    torch.testing.assert_close(out, reference, rtol=1e-9, atol=1e-10)
    direction = torch.randn_like(out)
    grads = torch.autograd.grad(out, fast, direction)
    expected = torch.autograd.grad(reference, slow, direction)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("asked", ASKED)
def test_flex_values_equal_the_loop(asked):
    batch, slots = tiny_batch(), ASKED[asked]
    tensors = [tensor.float() for tensor in draw(batch, slots, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that flex_attention is not compiled here
        out = plan_attention(batch, slots, "flex")(*tensors)
    torch.testing.assert_close(out, naive_attention(batch, *tensors, slots), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ASKED)
def test_flex_gradients_equal_the_loop_on_a_gpu(asked):
    batch, slots = tiny_batch().to("cuda"), ASKED[asked]
    # flex_attention asks for head dimensions of a power of two; zeros beyond D change no score and no value.
    fast = [torch.nn.functional.pad(t.detach().float().cuda(), (0, 16 - D)).requires_grad_() for t in draw(batch, slots, False)]
    slow = [tensor.cuda() for tensor in draw(batch, slots, False)]
    slow = [tensor.requires_grad_() for tensor in slow]
    scaled = [fast[0] * math.sqrt(16 / D), *fast[1:]]
    out = plan_attention(batch, slots, "flex")(*scaled)[..., :D]
    reference = torch.zeros_like(slow[0]) + naive_attention(batch, *slow, slots)
    torch.testing.assert_close(out.double(), reference, rtol=1e-2, atol=1e-3)
    direction = torch.randn_like(out)
    ours, theirs = torch.autograd.grad(out, fast, direction), torch.autograd.grad(reference, slow, direction.double())
    for a, b in zip(ours, theirs, strict=True):
        assert (a[..., :D].double() - b).norm() < 1e-2 * b.norm()


def test_flex_refuses_gradients_on_the_cpu():
    batch = tiny_batch()
    with pytest.raises(DrafterError, match="no backward on the CPU"):
        plan_attention(batch, Slots(3), "flex")(*draw(batch, Slots(3), True))


def test_unknown_backend():
    with pytest.raises(DrafterError, match="split, sdpa, flex"):
        plan_attention(tiny_batch(), Slots(3), "fast")
