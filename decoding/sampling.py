"""Distributions from logits, draws from distributions, and random numbers that belong to a request rather than to a batch."""

import copy
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor


def to_probs(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Turn logits into the distribution that is sampled from.

    Args:
        logits: [..., V].
        temperature: 0 gives all mass to the first largest logit.
        top_p, top_k: see `truncate`.

    Returns:
        [..., V] float32 (float64 for float64 logits).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return truncate(torch.softmax(logits / temperature, dim=-1), top_p, top_k)


def truncate(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Leave the likeliest tokens alone in a distribution, scaled to one again.

    First the `top_k` likeliest stay (0: all), then of those the fewest likeliest that hold `top_p` of what is left. Of equally likely
    tokens those with the lower id stay, so that exactly as many do as were asked for.

    Args:
        probs: [..., V], rows sum to one.
        top_p: in (0, 1]; 1 keeps all.
        top_k: 0 or more.
    """
    if top_p >= 1 and not top_k:
        return probs
    ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    if top_k:
        ordered[..., top_k:] = 0
    if top_p < 1:
        ahead = ordered.cumsum(-1) - ordered  # the mass of the likelier ones: exactly 0 for the first, which therefore always stays
        ordered = ordered.masked_fill(ahead >= top_p * ordered.sum(-1, keepdim=True), 0)
    kept = torch.zeros_like(probs).scatter(-1, ids, ordered)
    return kept / kept.sum(-1, keepdim=True)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index per row by inverting the cumulative distribution.

    Args:
        weights: [..., V], not negative, not all zero; need not sum to one.
        uniforms: [...] float64 in [0, 1).

    Returns:
        [...] int64; an index of weight zero is never drawn.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    threshold = cumulative[..., -1] * uniforms
    # The first index whose cumulative weight lies above the threshold: strictly, so that its own weight is not zero.
    return torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)


class Draw(IntEnum):
    """What a random number is for."""

    DRAFT = 0  # choosing the draft token of a slot
    ACCEPT = 1  # accepting it
    FINAL = 2  # the residual or bonus token, and the first token


_SLOTS = 1 << 16  # numbers set aside for one purpose in one round
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of SplitMix64
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64 taken as 64 plain bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014) on int64, which wraps around."""
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


class RandomStreams:
    """One counter-based random stream per request, read for a whole batch at once.

    A number is a hash of (seed, request id, the request's own round, purpose, slot). It depends on nothing else, so a request draws the
    same numbers in whatever batch it is decoded, and no generator has to be advanced request by request.
    """

    def __init__(self, seed: int, request_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        ids = torch.tensor(list(request_ids), dtype=torch.int64, device=device)
        key = _mix(torch.tensor((seed + 1) & (2**63 - 1), dtype=torch.int64, device=device) * _GOLDEN)
        self._keys = _mix(key ^ _mix((ids + 1) * _GOLDEN))
        self._rounds = torch.zeros_like(ids)

    def next_round(self) -> None:
        """Move every request on to fresh numbers."""
        self._rounds += 1

    def uniform(self, draw: Draw, count: int) -> Tensor:
        """Return [B, count] float64 in [0, 1), the present round's numbers for one purpose; asking again gives the same ones."""
        slots = torch.arange(count, device=self._keys.device)
        counters = (self._rounds * len(Draw) + int(draw))[:, None] * _SLOTS + slots
        # 52 bits, so that even the largest one leaves a total of any size when multiplied with it.
        return _shift(_mix(self._keys[:, None] + (counters + 1) * _GOLDEN), 12).double() * 2.0**-52

    def part(self, rows: Tensor) -> "RandomStreams":
        """The same streams, of some batch rows only."""
        some = copy.copy(self)
        some.select(rows)
        return some

    def select(self, rows: Tensor) -> None:
        """Keep the given batch rows, in that order."""
        self._keys, self._rounds = self._keys[rows], self._rounds[rows]
