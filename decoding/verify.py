"""Accept or reject drafted tokens so that what is committed has exactly the target's distribution (DESIGN 5, Verification).

Target rows are flat: request b owns `counts[b] + 1` consecutive rows, row k judging the k-th draft token and the last one giving the bonus
token. So requests may have different numbers of draft tokens verified, and nothing is computed for padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.sampling import sample


@dataclass(frozen=True)
class Verdict:
    """What verification made of a batch of blocks.

    Attributes:
        accepted: [B] int64, leading draft tokens accepted.
        token: [B] int64, the token after them: residual after a rejection, bonus if all passed.
    """

    accepted: Tensor
    token: Tensor


def verify_greedy(draft_tokens: Tensor, counts: Tensor, target_tokens: Tensor) -> Verdict:
    """Verify at temperature 0: a draft token passes if it is the target's own choice.

    Args:
        draft_tokens: [B, w] int64.
        counts: [B] int64, how many of them are verified (<= w).
        target_tokens: [sum(counts + 1)] int64, the target's argmax per flat row.
    """
    first, columns = _first_rows(counts), torch.arange(draft_tokens.shape[1], device=counts.device)
    verified = columns < counts[:, None]
    own = target_tokens[torch.where(verified, first[:, None] + columns, 0)]
    accepted = _leading((own == draft_tokens) & verified)
    return Verdict(accepted, target_tokens[first + accepted])


def verify_sampled(
    draft_tokens: Tensor, counts: Tensor, draft_probs: Tensor, target_probs: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor
) -> Verdict:
    """Verify by rejection sampling (Leviathan et al. 2023; Chen et al. 2023).

    Token x_k passes with probability min(1, p_t(x_k) / p_d(x_k)). After the first rejection the next token comes from
    norm(max(p_t - p_d, 0)) of that slot; if all pass, from the target's distribution of the next one.

    Args:
        draft_tokens: [B, w] int64, drawn from `draft_probs`.
        counts: [B] int64, how many of them are verified (<= w).
        draft_probs: [B, w, V], temperature applied.
        target_probs: [sum(counts + 1), V], the same temperature applied.
        accept_uniforms: [B, w] in [0, 1).
        final_uniforms: [B] in [0, 1).
    """
    first, columns = _first_rows(counts), torch.arange(draft_tokens.shape[1], device=counts.device)
    verified = columns < counts[:, None]
    p_target = target_probs[torch.where(verified, first[:, None] + columns, 0), draft_tokens]
    p_draft = draft_probs.gather(2, draft_tokens[..., None]).squeeze(2)
    accepted = _leading((accept_uniforms * p_draft < p_target) & verified)

    weights = target_probs[first + accepted]
    rejected = (accepted < counts).nonzero().squeeze(1)
    if rejected.numel():
        residual = (weights[rejected] - draft_probs[rejected, accepted[rejected]]).clamp_min_(0)
        # Where both distributions agree to the last bit but for rounding, the residual may vanish; the target's own is then the same thing.
        vanished = residual.sum(-1, keepdim=True) == 0
        weights[rejected] = torch.where(vanished, weights[rejected], residual)
    return Verdict(accepted, sample(weights, final_uniforms))


def _first_rows(counts: Tensor) -> Tensor:
    """[B] index of each request's first flat row."""
    rows = counts + 1
    return rows.cumsum(0) - rows


def _leading(passed: Tensor) -> Tensor:
    """[B] number of True before the first False of each row."""
    return passed.long().cumprod(1).sum(1)
