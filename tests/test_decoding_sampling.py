"""Draws follow their distribution, and belong to their request."""

import pytest
import torch
from decoding_cases import chi_square_p
from torch.testing import assert_close
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoding.sampling import Draw, RandomStreams, sample, to_probs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    naive = (logits / temperature).exp()
    assert_close(to_probs(logits, temperature), naive / naive.sum(-1, keepdim=True))


def test_temperature_zero_is_the_first_largest():
    assert to_probs(torch.tensor([[1.0, 3.0, 3.0]]), 0).tolist() == [[0.0, 1.0, 0.0]]


def test_bfloat16_logits_give_float32_probabilities():
    assert to_probs(torch.zeros(2, 3, dtype=torch.bfloat16), 1.0).dtype == torch.float32


def test_samples_follow_the_weights():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.5, 0.0])
    uniforms = RandomStreams(1, range(1000)).uniform(Draw.FINAL, 200).flatten()
    drawn = sample(weights.expand(len(uniforms), 6), uniforms)
    assert chi_square_p(torch.bincount(drawn, minlength=6), weights / weights.sum()) > 1e-3


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-52])
def test_the_extreme_draws_have_weight(uniform):
    weights = torch.tensor([0.0, 0.7, 0.1 + 0.2, 1e-9, 0.0])
    assert weights[sample(weights, torch.tensor(uniform, dtype=torch.float64))] > 0


def test_random_numbers_are_uniform_and_uncorrelated():
    streams = RandomStreams(7, range(400))
    blocks = []
    for _ in range(4):
        streams.next_round()
        blocks += [streams.uniform(draw, 100) for draw in Draw]
    numbers = torch.stack(blocks)  # [12, 400, 100]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.unique().numel() == numbers.numel()
    assert chi_square_p(torch.histc(numbers.float(), 100, 0, 1), torch.full((100,), 0.01)) > 1e-3
    for dim in range(3):  # neighbours: purpose and round, request, slot
        left, right = numbers.narrow(dim, 0, numbers.shape[dim] - 1), numbers.narrow(dim, 1, numbers.shape[dim] - 1)
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / left.numel() ** 0.5


def test_a_request_keeps_its_numbers_in_another_batch_and_after_others_left():
    one, many = RandomStreams(3, [42]), RandomStreams(3, [5, 42, 6])
    assert one.uniform(Draw.DRAFT, 4)[0].tolist() == many.uniform(Draw.DRAFT, 9)[1, :4].tolist()
    many.select(torch.tensor([2, 1]))
    one.next_round()
    many.next_round()
    assert one.uniform(Draw.ACCEPT, 2)[0].tolist() == many.uniform(Draw.ACCEPT, 2)[1].tolist()
    assert RandomStreams(4, [42]).uniform(Draw.DRAFT, 4).tolist() != RandomStreams(3, [42]).uniform(Draw.DRAFT, 4).tolist()


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (0.9, 0), (1.0, 3), (0.8, 5), (0.01, 0), (1.0, 100)])
def test_truncation_is_that_of_hugging_face(top_p, top_k):
    logits = torch.randn(50, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    assert_close(to_probs(logits, 0.7, top_p, top_k), torch.softmax(scores, dim=-1))


def test_of_equal_tokens_the_lower_ids_stay():
    even = torch.zeros(2, 6, dtype=torch.float64)
    assert to_probs(even, 1.0, top_k=2)[0].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert to_probs(even, 1.0, top_p=0.5)[1].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0])
    assert to_probs(even, 1.0, top_p=1.0, top_k=0)[0].tolist() == pytest.approx([1 / 6] * 6)
