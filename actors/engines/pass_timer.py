"""How long vLLM's passes of the target take by the number of their tokens: the cost table of an engine that serves through vLLM.

vLLM has no drafter of ours, so verification is imitated: every request's text is held in the prefix cache, and one engine step then runs
its next k + 1 tokens, as verifying k drafts would. Such a step applies the LM head to one row a request; the time that the head takes for
the other rows is measured by itself and added.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.engines.base import EngineSettings
from actors.engines.vllm import make_llm
from actors.errors import ActorError

PAGE = 32  # tokens of a page of the prefix cache; a text is cached in whole pages
COVERS = (
    "passes of the target in vLLM over texts in its prefix cache, the LM head on every token included; drafting and acceptance not included"
)


@dataclass(frozen=True)
class PassTimes:
    """Median seconds of a step: by tokens in the pass as asked, and of a decoding step of one token a request."""

    seconds: tuple[float, ...]
    plain: float


class VllmPassTimer:
    """Holds a vLLM engine; `vllm_environment` must be in the process's environment before."""

    def __init__(self, settings: EngineSettings, context: int, seed: int) -> None:
        """
        Args:
            settings: `max_length` leaves room for a block behind the context; `batch_tokens` hold the largest pass.
            context: tokens of each text, rounded down to whole pages.
        """
        self.context = max(context // PAGE, 1) * PAGE
        self.random = np.random.default_rng(seed)
        self.llm = make_llm(
            settings,
            enable_prefix_caching=True,
            block_size=PAGE,
            max_model_len=settings.max_length,
            max_num_batched_tokens=settings.batch_tokens,
            seed=seed,
        )
        config = self.llm.llm_engine.model_config
        self.vocabulary, self.hidden, self.dtype = config.get_vocab_size(), config.get_hidden_size(), config.dtype
        self._asked = 0

    def times(self, requests: int, tokens: Sequence[int], rounds: int, warmup: int) -> PassTimes:
        """Medians of `rounds` after `warmup`, sizes in a new random order in each."""
        texts = self.random.integers(0, self.vocabulary, (requests, self.context)).tolist()
        self._steps(texts, 1)  # into the prefix cache
        seconds: dict[int, list[float]] = {count: [] for count in tokens}
        for number in range(rounds + warmup):
            for count in self.random.permutation(list(tokens)).tolist():
                each, more = divmod(count, requests)
                new = [self.random.integers(0, self.vocabulary, each + (row < more)).tolist() for row in range(requests)]
                steps = self._steps([text + own for text, own in zip(texts, new, strict=True)], 1, cached=self.context)
                if len(steps) != 1:
                    raise ActorError(f"vLLM took {len(steps)} steps for a pass of {count} tokens: raise engine.batch_tokens")
                if number >= warmup:
                    seconds[count].append(steps[0])
        heads = self.llm.apply_model(_head_timer([requests, *tokens], self.hidden, self.dtype, rounds, warmup))[0]
        decoding = self._steps([[*text, 0] for text in texts], rounds + warmup + 1, cached=self.context)
        passes = (statistics.median(seconds[count]) + max(heads[count] - heads[requests], 0.0) for count in tokens)
        return PassTimes(tuple(passes), statistics.median(decoding[1 + warmup :]))

    def _steps(self, prompts: Sequence[list[int]], new_tokens: int, cached: int | None = None) -> list[float]:
        """Seconds of each engine step until all prompts have so many new tokens.

        Raises:
            ActorError: other than `cached` tokens of a prompt came from the prefix cache.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine = self.llm.llm_engine
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            engine.add_request(f"pass-{self._asked}", TokensPrompt(prompt_token_ids=prompt), sampling)
            self._asked += 1
        seconds, finished = [], []
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            outputs = engine.step()
            seconds.append(time.perf_counter() - started)
            finished += [output for output in outputs if output.finished]
        wrong = {output.num_cached_tokens for output in finished} - {cached}
        if cached is not None and wrong:
            raise ActorError(
                f"vLLM took {sorted(wrong)} tokens of a text from its prefix cache, not {cached}: fewer profile.requests or a shorter "
                "profile.context fit into it, or engine.kv_cache_gib gives it more room"
            )
        return seconds


def _head_timer(counts: Sequence[int], hidden: int, dtype: torch.dtype, rounds: int, warmup: int) -> Callable[[Any], dict[int, float]]:
    """To be applied to the model: median seconds of its LM head by rows."""

    def measure(model: Any) -> dict[int, float]:
        device = next(model.parameters()).device
        found = {}
        for count in counts:
            states, times = torch.randn(count, hidden, device=device).to(dtype), []
            for _ in range(rounds + warmup):
                started = time.perf_counter()
                float(model.compute_logits(states)[-1, -1])  # read, so that a GPU has finished
                times.append(time.perf_counter() - started)
            found[count] = statistics.median(times[warmup:])
        return found

    return measure
