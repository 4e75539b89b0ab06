"""Answers that go round in circles: small targets do this, and a drafter trained on them learns to predict the circle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from corpus.errors import CorpusError


@dataclass(frozen=True)
class LoopRule:
    """What counts as a loop.

    An answer loops if, for some period p <= `max_period` tokens, there is a stretch of it that holds `repeats` rounds of p tokens, at least
    `min_tokens` in all, in which at least `agreement` of the tokens equal the token one period earlier. The slack of 10 % catches loops
    that count ("4. Eat well. 5. Eat well. ..."); tables, code and lists with real content agree far less from row to row.
    """

    max_period: int = 64
    repeats: int = 4
    min_tokens: int = 48
    agreement: float = 0.9

    def __post_init__(self) -> None:
        if self.max_period < 1 or self.repeats < 2 or self.min_tokens < 2 or not 0 < self.agreement <= 1:
            raise CorpusError(f"{self} is no rule for loops: max_period >= 1, repeats >= 2, min_tokens >= 2, 0 < agreement <= 1.")


def is_looping(ids: Sequence[int] | np.ndarray, rule: LoopRule) -> bool:
    """Whether an answer's tokens repeat themselves, see `LoopRule`."""
    tokens = np.asarray(ids)
    for period in range(1, rule.max_period + 1):
        length = max(rule.repeats * period, rule.min_tokens)
        if length > len(tokens):
            # A longer period needs no shorter stretch, so no later one can fit either.
            return False
        compared = length - period
        equal = tokens[period:] == tokens[:-period]
        if np.count_nonzero(equal) < rule.agreement * compared:
            continue
        agrees = np.concatenate([[0], np.cumsum(equal)])
        if (agrees[compared:] - agrees[:-compared]).max() >= rule.agreement * compared:
            return True
    return False
