import math

import pytest
import torch
from drafters_cases import G, tiny_batch, tiny_sample, tiny_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import DrafterError, pack, sample_anchors
from drafters.anchors import slot_weights


@given(mask=st.lists(st.booleans(), min_size=2, max_size=40), count=st.integers(0, 50), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_anchors_are_distinct_sorted_candidates(mask, count, seed):
    loss_mask = torch.tensor(mask)
    drawn = sample_anchors(loss_mask, count, torch.Generator().manual_seed(seed))
    candidates = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert set(drawn.tolist()) <= set(candidates)
    assert len(drawn) == min(count, len(candidates))
    assert torch.equal(drawn, sample_anchors(loss_mask, count, torch.Generator().manual_seed(seed)))


def test_anchors_are_drawn_evenly():
    mask = torch.ones(11, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.cat([sample_anchors(mask, 3, generator) for _ in range(2000)]), minlength=10)
    assert counts.sum() == 6000
    assert (counts - 600).abs().max() < 5 * math.sqrt(600)


def test_targets_equal_a_walk_along_each_sequence():
    samples, anchors = tiny_samples()
    batch = tiny_batch()
    targets = batch.targets(G)
    block = 0
    for sample, chosen in zip(samples, anchors, strict=True):
        for a in chosen.tolist():
            alive = True
            for k in range(G):
                alive = alive and a + k + 1 < len(sample.input_ids) and bool(sample.loss_mask[a + k + 1])
                assert bool(targets.valid[block, k]) == alive
                if alive:
                    assert targets.labels[block, k] == sample.input_ids[a + k + 1]
                    assert targets.previous[block, k] == sample.input_ids[a + k]
                    row = sample.last_rows.tolist().index(a + k)
                    assert torch.equal(batch.last_hidden[targets.teacher_rows[block, k]], sample.last_hidden[row])
            block += 1
    assert block == batch.num_anchors


def test_packing_keeps_every_token_and_its_place():
    samples, anchors = tiny_samples()
    batch = tiny_batch()
    for s, sample in enumerate(samples):
        part = slice(int(batch.offsets[s]), int(batch.offsets[s + 1]))
        assert torch.equal(batch.input_ids[part], sample.input_ids)
        assert batch.positions[part].tolist() == list(range(len(sample.input_ids)))
        assert torch.equal(batch.context[part], torch.cat(list(sample.context), dim=1))
        assert torch.equal(batch.anchors[batch.anchor_sequence == s] - batch.offsets[s], anchors[s])


def test_slot_weights():
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1, math.exp(-1 / 4), math.exp(-2 / 4)])
    assert slot_weights(3, float("inf")).tolist() == [1, 1, 1]


def test_bad_samples_are_named():
    good = tiny_sample(10, [(4, 10)], 0)
    with pytest.raises(DrafterError, match=r"sample 1: loss_mask.*context"):
        pack(
            [good, type(good)(good.input_ids, good.loss_mask[:-1], good.context[:, :-1], good.last_hidden, good.last_rows)],
            [torch.tensor([4])] * 2,
        )
    with pytest.raises(DrafterError, match="not supervised"):
        pack([good], [torch.tensor([3])])
    with pytest.raises(DrafterError, match="outside"):
        pack([good], [torch.tensor([9])])
    with pytest.raises(DrafterError, match="one anchor list"):
        pack([], [])


def test_a_missing_teacher_row_is_an_error_not_a_wrong_teacher():
    sample = tiny_sample(10, [(4, 10)], 0)
    short = type(sample)(sample.input_ids, sample.loss_mask, sample.context, sample.last_hidden[:-2], sample.last_rows[:-2])
    batch = pack([short], [torch.tensor([4, 6])])
    with pytest.raises(DrafterError, match=r"sequence 0.*position 7"):
        batch.targets(G)
