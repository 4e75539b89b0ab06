"""How fast a drafter would serve, from its accepted length and what its rounds cost."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingCost:
    """Seconds of a round of whole blocks at a stated number of requests.

    Attributes:
        requests: R, decoded together.
        block: g, tokens drafted for each request and round.
        draft: proposing the block for all requests, with that backbone and head.
        verify: the target's pass over R * (g + 1) tokens.
        plain: a round without any drafter.
    """

    requests: int
    block: int
    draft: float
    verify: float
    plain: float

    @property
    def round(self) -> float:
        return self.draft + self.verify

    def tokens_per_second(self, tau: float) -> float:
        """Of all requests together, where a round commits `tau` tokens of each."""
        return self.requests * tau / self.round

    def speedup(self, tau: float) -> float:
        """Times as fast as plain decoding: a longer block that is accepted more but costs more is judged by both."""
        return tau * self.plain / self.round
