"""Ray actors that decode held-out prompts with target and drafter, and plainly for the comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from actors.cluster import CPU_ENVIRONMENT
from actors.drafter import build_drafter
from decoding.loop import speculative_decode
from decoding.settings import Generation, SamplingSettings
from decoding.target import TransformersTarget
from drafters.config import DrafterConfig
from storage.checkpoint import load_drafter
from storage.object_store import ObjectStore


@dataclass(frozen=True)
class DecoderSettings:
    """`actors` decoders of `threads` CPU threads each; `dtype` is the target's and the drafter's."""

    actors: int
    threads: int
    gpus: float
    dtype: str
    batch_size: int


@dataclass(frozen=True)
class Prompt:
    """One request; `number` keys its random draws, so that its output does not depend on who decodes it."""

    number: int
    token_ids: tuple[int, ...]


class Decoder:
    """Holds the target and one drafter."""

    def __init__(self, model: str, layer_ids: tuple[int, ...], drafter: ObjectStore, settings: DecoderSettings) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, settings.dtype)
        self.batch_size = settings.batch_size
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        files = load_drafter(drafter)
        config = DrafterConfig.from_dict(files.config)
        self.target = TransformersTarget.for_drafter(loaded.to(device), layer_ids, config)
        self.drafter = build_drafter(model, config, settings.dtype)
        self.drafter.load_trainable(files.tensors)
        self.drafter.to(device).eval()

    def decode(self, prompts: Sequence[Prompt], sampling: SamplingSettings, drafted: bool) -> list[Generation]:
        """Decode a group of prompts together, with the drafter or plainly."""
        return speculative_decode(
            self.target,
            self.drafter if drafted else None,
            [prompt.token_ids for prompt in prompts],
            sampling,
            request_ids=[prompt.number for prompt in prompts],
            batch_size=self.batch_size,
        )

    @torch.inference_mode()
    def top2_gap(self, prompt: Prompt, tokens: Sequence[int]) -> float:
        """How far apart the target's two best logits are after `prompt` and `tokens`."""
        ids = torch.tensor([[*prompt.token_ids, *tokens]], device=self.target.device)
        cache = self.target.new_cache(1, ids.shape[1])
        states = self.target.forward(cache, ids, torch.tensor([ids.shape[1]], device=self.target.device), capture=False)
        best = self.target.logits(states.hidden[:, -1])[0].float().topk(2).values
        return float(best[0] - best[1])


DecoderActor: Any = ray.remote(max_restarts=1)(Decoder)


@dataclass(frozen=True)
class Decoded:
    """What came of one prompt, with the drafter and without.

    `gap`: at temperature 0, where the two texts part, the distance of the target's two best logits there; None where they are equal.
    """

    drafted: Generation
    plain: Generation
    gap: float | None = None


def decode_prompts(
    model: str,
    layer_ids: tuple[int, ...],
    drafter: ObjectStore,
    prompts: Sequence[Prompt],
    sampling: SamplingSettings,
    settings: DecoderSettings,
    on_done: Callable[[int], None],
) -> list[Decoded]:
    """Decode every prompt both ways, groups of `batch_size` spread over the actors.

    Each actor alternates drafted and plain group by group (A B B A), so that neither profits from a warmer machine.
    """
    groups = [prompts[start : start + settings.batch_size] for start in range(0, len(prompts), settings.batch_size)]
    environment = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    actors = [
        DecoderActor.options(num_cpus=settings.threads, num_gpus=settings.gpus, runtime_env={"env_vars": environment}).remote(
            model, layer_ids, drafter, settings
        )
        for _ in range(min(settings.actors, len(groups)))
    ]
    # A first short request each way: the first pass through a model pays for its set-up.
    warm = SamplingSettings(sampling.temperature, min(8, sampling.max_new_tokens), sampling.stop_ids, sampling.seed)
    ray.get([actor.decode.remote(prompts[:1], warm, drafted) for actor in actors for drafted in (True, False)])
    pending: dict[Any, tuple[int, bool]] = {}
    results: dict[tuple[int, bool], list[Generation]] = {}
    for number, group in enumerate(groups):
        actor = actors[number % len(actors)]
        for drafted in (True, False) if (number // len(actors)) % 2 == 0 else (False, True):
            pending[actor.decode.remote(group, sampling, drafted)] = (number, drafted)
    while pending:
        finished, _ = ray.wait(list(pending), num_returns=1)
        for reference in finished:
            key = pending.pop(reference)
            results[key] = ray.get(reference)
            on_done(len(groups[key[0]]))
    outcomes = [
        Decoded(drafted, plain)
        for number in range(len(groups))
        for drafted, plain in zip(results[number, True], results[number, False], strict=True)
    ]
    if sampling.temperature > 0:
        return outcomes
    return [_with_gap(outcome, prompt, actors[0]) for outcome, prompt in zip(outcomes, prompts, strict=True)]


def _with_gap(outcome: Decoded, prompt: Prompt, actor: Any) -> Decoded:
    drafted, plain = outcome.drafted.tokens, outcome.plain.tokens
    if drafted == plain:
        return outcome
    same = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), min(len(drafted), len(plain)))
    return replace(outcome, gap=ray.get(actor.top2_gap.remote(prompt, plain[:same])))
