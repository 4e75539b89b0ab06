"""How a request is decoded, and what comes back."""

import math
from dataclasses import dataclass

from torch import Tensor

from decoding.errors import DecodingError
from decoding.sampling import to_probs


@dataclass(frozen=True)
class SamplingSettings:
    """How every request of a call is decoded.

    Attributes:
        temperature: divides the logits of target and drafter alike; 0 is greedy.
        max_new_tokens: tokens to generate at most, the stop token included; respected exactly.
        stop_ids: token ids that end a request. The stop token itself is kept, nothing after it is.
        seed: with the request's id it determines every random draw of that request.
        top_p, top_k: tokens that may be sampled, see `decoding.sampling.truncate`. Target and drafter are cut alike; what is committed has
            exactly the target's distribution cut that way, since verification judges by the distributions that were sampled from.
    """

    temperature: float = 0.0
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise DecodingError(
                f"temperature={self.temperature} is not a number >= 0. Use 0 for greedy decoding, 1 for the target's own distribution."
            )
        if self.max_new_tokens < 1:
            raise DecodingError(f"max_new_tokens={self.max_new_tokens} leaves nothing to generate. Use at least 1.")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise DecodingError(f"top_p={self.top_p}, top_k={self.top_k}: give top_p in (0, 1], 1 for all; top_k at least 0, 0 for all.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled from, for logits [..., V] of target or drafter."""
        return to_probs(logits, self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class Round:
    """One verification round of one request.

    Attributes:
        drafted: draft tokens sent to the target.
        accepted: draft tokens kept: accepted by the target and not after a stop token.
        committed: tokens added to the output: `accepted` plus the residual or bonus token, or exactly `accepted` where an
            accepted draft token was a stop token (then nothing after it counts, neither as a trial nor as a token).
        confidence: the drafter's c_k for each drafted token, float64 so that its logit can be recovered; empty without a confidence head.
        draft: the drafted tokens themselves.
    """

    drafted: int
    accepted: int
    committed: int
    confidence: tuple[float, ...] = ()
    draft: tuple[int, ...] = ()

    @property
    def stopped_in_draft(self) -> bool:
        """Whether an accepted draft token was the stop token."""
        return self.committed == self.accepted

    @property
    def counted(self) -> int:
        """Draft tokens that count: all of them, or those up to the accepted stop token."""
        return self.accepted if self.stopped_in_draft else self.drafted


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of one request: its share (1 / requests then active) of each batched step, so that sums are wall time.

    Attributes:
        prefill: the prompt through target and drafter context, and the first token.
        draft: the drafter's backbone, and appending the committed positions to its context.
        head: the drafter's LM head, its sequential and confidence heads, and choosing its tokens.
        verify: the target's forward pass and its LM head.
        total: everything; what is not in the parts is acceptance, scheduling and bookkeeping.
    """

    prefill: float
    draft: float
    head: float
    verify: float
    total: float


@dataclass(frozen=True)
class Generation:
    """One request's output.

    Attributes:
        tokens: generated ids without the prompt; ends with the stop token where there was one. The first comes from the prefill, so
            `len(tokens) == 1 + sum(round.committed for round in rounds)`.
        rounds: its verification rounds in order (one per token in plain decoding, with nothing drafted).
        finish_reason: "stop" or "length".
        seconds: its share of the wall time.
    """

    tokens: list[int]
    rounds: list[Round]
    finish_reason: str
    seconds: Seconds
