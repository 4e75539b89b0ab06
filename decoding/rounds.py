"""Recorded verification rounds as plain arrays: what calibration is fitted to and what the simulator replays."""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoding.errors import DecodingError
from decoding.settings import Generation

_ARRAYS = ("request", "drafted", "verified", "accepted", "committed", "confidence", "prompt", "domain", "prompt_tokens")


@dataclass(frozen=True)
class RecordedRounds:
    """Rounds in the order they happened within each request, whole blocks verified.

    Attributes:
        request: [N] int64, index of the round's request, ascending.
        drafted: [N] int64, draft tokens sent to the target.
        verified: [N] int64, those that count: up to an accepted stop token, else all (`Round.counted`).
        accepted: [N] int64.
        committed: [N] int64, tokens added to the output.
        confidence: [N, g] float64, c_k as the drafter gave it; NaN where nothing was drafted, all NaN without a confidence head.
        prompt: [R] int64, a number for each request's prompt; requests that repeat a prompt share it.
        domain: [R] str.
        prompt_tokens: [R] int64.
        facts: where the rounds come from, kept in the file.
    """

    request: np.ndarray
    drafted: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    committed: np.ndarray
    confidence: np.ndarray
    prompt: np.ndarray
    domain: np.ndarray
    prompt_tokens: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request)

    @property
    def requests(self) -> int:
        return len(self.prompt)

    @property
    def block(self) -> int:
        """Draft tokens a block, g."""
        return self.confidence.shape[1]

    @property
    def tried(self) -> np.ndarray:
        """[N, g] bool: the position was verified, and nothing before it had ended the text."""
        return np.arange(self.block) < self.verified[:, None]

    @property
    def survived(self) -> np.ndarray:
        """[N, g] bool: this position and all before it were accepted."""
        return np.arange(self.block) < self.accepted[:, None]

    def select(self, rounds: np.ndarray) -> "RecordedRounds":
        """The rounds where `rounds` ([N] bool) holds; requests keep their numbers."""
        kept = {name: getattr(self, name)[rounds] for name in _ARRAYS[:6]}
        return RecordedRounds(**kept, prompt=self.prompt, domain=self.domain, prompt_tokens=self.prompt_tokens, facts=self.facts)

    @classmethod
    def from_generations(
        cls,
        generations: Sequence[Generation],
        block: int,
        prompts: Sequence[int],
        domains: Sequence[str],
        prompt_tokens: Sequence[int],
        facts: dict[str, Any] | None = None,
    ) -> "RecordedRounds":
        """Rounds of decoded requests; `prompts`, `domains` and `prompt_tokens` say of each what it asked."""
        rounds = [(request, one) for request, generation in enumerate(generations) for one in generation.rounds]
        confidence = np.full((len(rounds), block), np.nan)
        for row, (_, one) in enumerate(rounds):
            confidence[row, : len(one.confidence)] = one.confidence
        numbers = [(request, one.drafted, one.counted, one.accepted, one.committed) for request, one in rounds]
        columns = np.array(numbers, dtype=np.int64).reshape(-1, 5).T
        named = dict(zip(_ARRAYS[:5], columns, strict=True))
        return cls(
            **named,
            confidence=confidence,
            prompt=np.array(prompts, dtype=np.int64),
            domain=np.array(domains, dtype=np.str_),
            prompt_tokens=np.array(prompt_tokens, dtype=np.int64),
            facts=facts or {},
        )

    @classmethod
    def joined(cls, parts: Sequence["RecordedRounds"]) -> "RecordedRounds":
        """Several recordings of one drafter as one; requests are numbered on."""
        if len({part.block for part in parts}) != 1:
            raise DecodingError("recordings of drafters with different block lengths cannot be joined")
        first = np.cumsum([0, *(part.requests for part in parts)])
        shifted = [part.request + start for part, start in zip(parts, first, strict=False)]
        merged = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS[1:]}
        return cls(np.concatenate(shifted), **merged, facts=parts[0].facts)

    def to_bytes(self) -> bytes:
        """A NumPy archive."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, facts=np.array(json.dumps(self.facts)), **{name: getattr(self, name) for name in _ARRAYS})
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "RecordedRounds":
        """Inverse of `to_bytes`.

        Raises:
            DecodingError: the bytes are not such an archive; `where` names them.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                return cls(**{name: archive[name] for name in _ARRAYS}, facts=json.loads(str(archive["facts"])))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DecodingError(f"{where} holds no recorded rounds ({error}): it is torn, or another file. Record them anew.") from error
