"""Verification is lossless: exactly the target's distribution comes out, and the test would notice if it did not."""

import pytest
import torch
from decoding_cases import chi_square_p

from decoding.sampling import Draw, RandomStreams, sample, to_probs
from decoding.verify import Verdict, verify_greedy, verify_sampled

VOCAB, BLOCK, LENGTH, ROLLOUTS = 4, 3, 4, 200_000


def markov(seed):
    """[V, V] p(next | previous), far from uniform, one entry zero."""
    table = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
    table[1, 2] = 0
    return table / table.sum(1, keepdim=True)


def rollout(verify, ragged):
    """First LENGTH tokens after token 0, by drafting from one Markov chain and verifying against another, for all rollouts at once."""
    target, draft = markov(1), markov(2)
    streams = RandomStreams(0, range(ROLLOUTS), "cpu")
    text, lengths = torch.zeros(ROLLOUTS, LENGTH + BLOCK + 2, dtype=torch.int64), torch.ones(ROLLOUTS, dtype=torch.int64)
    rows, columns = torch.arange(ROLLOUTS), torch.arange(BLOCK)
    counts = rows % (BLOCK + 1) if ragged else torch.full((ROLLOUTS,), BLOCK)
    for _ in range(LENGTH):
        streams.next_round()
        previous, tokens = text[rows, lengths - 1], []
        anchor, uniforms = previous, streams.uniform(Draw.DRAFT, BLOCK)
        for k in range(BLOCK):
            previous = sample(draft[previous], uniforms[:, k])
            tokens.append(previous)
        tokens = torch.stack(tokens, 1)
        before = torch.cat([anchor[:, None], tokens], 1)
        flat = target[before][torch.arange(BLOCK + 1) <= counts[:, None]]
        verdict = verify(
            tokens, counts, draft[before[:, :-1]], flat, streams.uniform(Draw.ACCEPT, BLOCK), streams.uniform(Draw.FINAL, 1)[:, 0]
        )
        emitted = torch.where(columns < verdict.accepted[:, None], tokens, 0)
        emitted = torch.cat([emitted, torch.zeros(ROLLOUTS, 1, dtype=torch.int64)], 1).scatter(
            1, verdict.accepted[:, None], verdict.token[:, None]
        )
        room = lengths <= LENGTH  # rows with enough tokens go on, unseen
        places = (lengths[:, None] + torch.arange(BLOCK + 1)).clamp(max=text.shape[1] - 1)
        text = torch.where(room[:, None], text.scatter(1, places, emitted), text)
        lengths = torch.where(room, lengths + verdict.accepted + 1, lengths)
    assert int(lengths.min()) > LENGTH
    codes = (text[:, 1 : LENGTH + 1] * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    return torch.bincount(codes, minlength=VOCAB**LENGTH)


def exact():
    target, joint = markov(1), markov(1)[0]
    for _ in range(LENGTH - 1):
        joint = joint[..., None] * target
    return joint.flatten()


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_committed_has_the_targets_distribution(ragged):
    assert chi_square_p(rollout(verify_sampled, ragged), exact()) > 1e-3


def greedy_acceptance(tokens, counts, draft, target, accept, final):
    """Wrong: passes whenever the target finds the token at least as likely as an even chance."""
    return verify_sampled(tokens, counts, draft, target, torch.full_like(accept, 0.5), final)


def target_as_residual(tokens, counts, draft, target, accept, final):
    """Wrong: after a rejection draws from the target instead of the residual."""
    verdict = verify_sampled(tokens, counts, draft, target, accept, final)
    first = (counts + 1).cumsum(0) - counts - 1
    return Verdict(verdict.accepted, sample(target[first + verdict.accepted], final))


def shared_random_number(tokens, counts, draft, target, accept, final):
    """Wrong: decides acceptance and the residual by one and the same number."""
    return verify_sampled(tokens, counts, draft, target, accept, accept[torch.arange(len(counts)), 0])


def off_by_one_row(tokens, counts, draft, target, accept, final):
    """Wrong: judges each draft token by the next one's row."""
    return verify_sampled(tokens, counts, draft, target.roll(-1, 0), accept, final)


@pytest.mark.parametrize("wrong", [greedy_acceptance, target_as_residual, shared_random_number, off_by_one_row])
def test_a_wrong_verifier_is_caught(wrong):
    assert chi_square_p(rollout(wrong, ragged=False), exact()) < 1e-9


def test_equal_distributions_accept_everything():
    probs = markov(3)[torch.tensor([[0, 1, 2], [3, 2, 1]])]
    tokens, counts = torch.tensor([[0, 3, 1], [1, 0, 3]]), torch.tensor([3, 2])
    flat = torch.cat([probs[0], markov(3)[:1], probs[1, :2], markov(3)[:1]])
    verdict = verify_sampled(tokens, counts, probs, flat, torch.full((2, 3), 1 - 1e-12, dtype=torch.float64), torch.zeros(2))
    assert verdict.accepted.tolist() == [3, 2]


def test_a_residual_that_rounds_to_nothing_falls_back_on_the_target():
    draft = torch.tensor([[[0.5, 0.5, 0.0]]])
    target = torch.tensor([[0.5 - 1e-7, 0.5, 0.0], [0.0, 0.0, 1.0]])
    verdict = verify_sampled(
        torch.tensor([[0]]), torch.tensor([1]), draft, target, torch.tensor([[1 - 1e-12]], dtype=torch.float64), torch.zeros(1)
    )
    assert verdict.accepted.tolist() == [0]
    assert verdict.token.tolist() == [0]


def test_greedy_is_sampling_at_temperature_zero():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4 * 4, 6, generator=random, dtype=torch.float64)
    draft = torch.randn(4, 3, 6, generator=random, dtype=torch.float64)
    draft[0], draft[1, 1:] = logits[:3], logits[5:7]
    counts = torch.tensor([3, 3, 3, 3])
    tokens = draft.argmax(-1)
    greedy = verify_greedy(tokens, counts, logits.argmax(-1))
    uniforms = torch.rand(4, 4, generator=random, dtype=torch.float64)
    sampled = verify_sampled(tokens, counts, to_probs(draft, 0), to_probs(logits, 0), uniforms[:, :3], uniforms[:, 3])
    assert greedy.accepted.tolist() == sampled.accepted.tolist()
    assert greedy.token.tolist() == sampled.token.tolist()
    assert greedy.accepted[0] == 3


def test_nothing_drafted_gives_the_bonus_token():
    empty = torch.zeros(2, 0, dtype=torch.int64)
    verdict = verify_greedy(empty, torch.zeros(2, dtype=torch.int64), torch.tensor([5, 6]))
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([0, 0], [5, 6])
