"""What producers and generators ask of a target engine, whichever it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from corpus.answers import FAILED, LENGTH, STOP


@dataclass(frozen=True)
class AnswerSettings:
    """Sampling of the target's answers."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """Token ids that the engine produced, the stop token included, and why it ended: `stop`, `length`, or `failed` for the reason given."""

    token_ids: list[int]
    finish_reason: str
    error: str = ""


@dataclass(frozen=True)
class EngineSettings:
    """How to run the target. `dtype` is what the engine computes in; the cache stores bf16 whatever it is."""

    model: str  # local folder, as resolved
    layer_ids: tuple[int, ...]  # 0-based decoder layers
    engine: str = "vllm"  # vllm | hf
    dtype: str = "bfloat16"
    max_length: int = 2048  # tokens of a row
    batch_tokens: int = 2048  # tokens of one forward pass
    batch_rows: int = 64
    threads: int = 1  # CPU threads of one engine process
    tensor_parallel: int = 1
    kv_cache_gib: int = 1  # CPU only
    answers: AnswerSettings | None = None  # for engines that answer and capture in one pass


@dataclass(frozen=True)
class Captured:
    """Hidden states of one row: the residual stream, before the final norm, in the engine's dtype.

    Attributes:
        context: [L, T, H], after each captured decoder layer.
        last_hidden: [T, H], after the last layer.
    """

    context: Tensor
    last_hidden: Tensor


class HiddenStateEngine(Protocol):
    """Runs the target over whole rows and returns the states of exactly these rows, in their order."""

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        """Capture rows of token ids, each at most `max_length` long."""
        ...

    def answer(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Answer, Captured]]:
        """Answer prompts shorter than `max_length` and capture prompt and answer in the same request.

        Yields (index into `prompts`, answer, states) as requests finish. The states are those of all tokens but the last, which was
        produced and never read.
        """
        ...


def finished_answer(token_ids: Sequence[int], finish_reason: str) -> Answer:
    """What an engine says of an answer; one that it aborted, whatever it calls that, has failed."""
    if finish_reason in (STOP, LENGTH):
        return Answer(list(token_ids), finish_reason)
    return Answer([], FAILED, f"the engine ended the answer after {len(token_ids)} tokens with finish_reason {finish_reason!r}")


class AnswerEngine(Protocol):
    """Answers prompts. These go in and answers come out as token ids, so that nothing is ever tokenized twice.

    Attributes:
        name: what the data set card says of the engine.
        max_length: tokens of prompt and answer together.
    """

    name: str
    max_length: int

    def ask(self, key: int, prompt: Sequence[int]) -> None:
        """Hand in a prompt that leaves room for an answer."""
        ...

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Yield (key, answer) as they come, in whatever order, until none is left. More may be asked between two.

        Raises:
            EngineLost: the engine is gone; what it finished before has been yielded.
        """
        ...

    def close(self) -> None:
        """Give up what is asked and not answered."""
        ...
