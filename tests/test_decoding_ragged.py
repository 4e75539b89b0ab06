"""Requests of about one length attend together: the cheapest cut of a batch, against all of them."""

import itertools

import numpy as np
import pytest

from decoding import ragged
from decoding.ragged import neighbours


def cost(keys, ends):
    return sum(ragged._KEYS_OF_A_CALL + (end - start) * max(keys[start:end]) for start, end in itertools.pairwise((0, *ends)))


def cheapest(keys):
    inner = range(1, len(keys))
    return min(cost(keys, (*cuts, len(keys))) for n in range(len(keys)) for cuts in itertools.combinations(inner, n))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_cheaper(seed):
    random = np.random.default_rng(seed)
    keys = random.integers(1, 3000, random.integers(1, 11))
    if seed % 2:
        keys = -np.sort(-keys)
    parts = neighbours(keys)
    assert np.concatenate([np.arange(len(keys))[part.rows] for part in parts]).tolist() == list(range(len(keys)))
    assert [part.span for part in parts] == [max(keys[part.rows]) for part in parts]
    assert cost(keys, [part.rows.stop for part in parts]) == cheapest(keys)


def test_one_long_text_does_not_hold_up_the_short_ones():
    assert [(part.rows.start, part.rows.stop, part.span) for part in neighbours(np.array([9000, *[50] * 63]))] == [
        (0, 1, 9000),
        (1, 64, 50),
    ]


def test_requests_of_one_length_stay_together():
    assert len(neighbours(np.full(64, 500))) == 1
