"""Ray actors that decode prompts with a target, plainly and with any number of drafters.

Prompts come in groups, which are decoded together and finished together. A group is the same whoever decodes it and whatever was decoded
before, and a request's random draws belong to the request, so the tokens do not depend on the number of actors or on restarts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayActorError

from actors.cluster import CPU_ENVIRONMENT, death_reason
from actors.drafter import build_drafter, load_target_head, open_drafter
from actors.errors import ActorError
from decoding.latency import RoundCost, round_cost
from decoding.loop import speculative_decode
from decoding.policies import Policy, StaticLength
from decoding.settings import Generation, SamplingSettings
from decoding.target import TransformersTarget
from drafters.drafter import Drafter
from storage.object_store import ObjectStore

T = TypeVar("T")

PLAIN = "none"
"""The name under which decoding without a drafter goes."""
RESTARTS = 3
"""How often a decoder that died, and the group that it died with, are tried again."""
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class DecoderSettings:
    """`actors` decoders of `threads` CPU threads each; `dtype` is the target's and the drafters'; `draft_tokens` a round at most, None:
    whole blocks."""

    actors: int
    threads: int
    gpus: float
    dtype: str
    batch_size: int
    draft_tokens: int | None = None


@dataclass(frozen=True)
class Prompt:
    """One request; `number` keys its random draws, so that its output does not depend on who decodes it."""

    number: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Prompts that are decoded together, at most `batch_size`, by each of the drafters `names` (PLAIN is nobody) and plainly."""

    prompts: tuple[Prompt, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Decoded:
    """What came of one prompt, with a drafter and without, one right after the other on the same machine.

    `gap`: at temperature 0, where the two texts part, the distance of the target's two best logits there; None where they are equal.
    """

    drafted: Generation
    plain: Generation
    gap: float | None = None


OnGroup = Callable[[int, dict[str, list[Decoded]]], None]


class Decoder:
    """Holds the target and drafters for it."""

    def __init__(self, model: str, drafters: Mapping[str, ObjectStore], settings: DecoderSettings) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_size = settings.batch_size
        self.policy = Policy() if settings.draft_tokens is None else StaticLength(settings.draft_tokens)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype))
        loaded = loaded.to(device)
        head = load_target_head(model, settings.dtype) if drafters else None  # one for all: it is most of a small drafter
        self.targets: dict[str, TransformersTarget] = {PLAIN: TransformersTarget(loaded)}
        self.drafters: dict[str, Drafter] = {}
        for name, store in drafters.items():
            opened = open_drafter(store)
            drafter = build_drafter(model, opened.config, settings.dtype, head)
            drafter.load_trainable(opened.tensors)
            self.drafters[name] = drafter.to(device).eval().for_decoding()
            self.targets[name] = TransformersTarget.for_drafter(loaded, opened.layer_ids, opened.config)

    def decode(self, prompts: Sequence[Prompt], sampling: SamplingSettings, name: str, policy: Policy | None = None) -> list[Generation]:
        """Decode prompts together, with the drafter of that name or plainly; a policy in place of the settings' one."""
        return speculative_decode(
            self.targets[name],
            self.drafters.get(name),
            [prompt.token_ids for prompt in prompts],
            sampling,
            request_ids=[prompt.number for prompt in prompts],
            batch_size=self.batch_size,
            policy=policy or self.policy,
        )

    def decode_group(self, group: Group, sampling: SamplingSettings) -> dict[str, list[Decoded]]:
        """Decode a group plainly and with each drafter, so A B A B over the groups: neither profits from a warmer machine."""
        plain = self.decode(group.prompts, sampling, PLAIN)
        results = {}
        for name in group.names:
            drafted = plain if name == PLAIN else self.decode(group.prompts, sampling, name)
            results[name] = [Decoded(a, b) for a, b in zip(drafted, plain, strict=True)]
        if not sampling.greedy:
            return results
        return {
            name: [self._with_gap(outcome, prompt) for outcome, prompt in zip(outcomes, group.prompts, strict=True)]
            for name, outcomes in results.items()
        }

    def warm_up(self, prompt: Prompt, sampling: SamplingSettings) -> None:
        """The first pass through a model pays for its set-up."""
        short = SamplingSettings(sampling.temperature, min(8, sampling.max_new_tokens), sampling.stop_ids, sampling.seed)
        for name in self.targets:
            self.decode([prompt], short, name)

    def round_cost(self, name: str, batch: int, context: int, repeats: int) -> RoundCost:
        """What a round of this drafter costs, its sequential head apart."""
        return round_cost(self.targets[name], self.drafters[name], batch, context, repeats)

    def _with_gap(self, outcome: Decoded, prompt: Prompt) -> Decoded:
        drafted, plain = outcome.drafted.tokens, outcome.plain.tokens
        if drafted == plain:
            return outcome
        same = next((i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b), min(len(drafted), len(plain)))
        return replace(outcome, gap=self.top2_gap(prompt, plain[:same]))

    @torch.inference_mode()
    def top2_gap(self, prompt: Prompt, tokens: Sequence[int]) -> float:
        """How far apart the target's two best logits are after `prompt` and `tokens`."""
        target = self.targets[PLAIN]
        ids = torch.tensor([[*prompt.token_ids, *tokens]], device=target.device)
        states = target.forward(target.new_cache(1, ids.shape[1]), ids, torch.tensor([ids.shape[1]], device=target.device), capture=False)
        best = target.logits(states.hidden[:, -1])[0].float().topk(2).values
        return float(best[0] - best[1])


DecoderActor: Any = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS)(Decoder)


class DecoderPool:
    """Decoders in Ray actors, on a cluster that is up; as many as were asked for, but no more than `groups`."""

    def __init__(self, model: str, drafters: Mapping[str, ObjectStore], settings: DecoderSettings, groups: int) -> None:
        self.actors = start_decoders(model, drafters, settings, groups)

    def decode(
        self, groups: Sequence[Group], sampling: SamplingSettings, on_group: Callable[[int, dict[str, list[Decoded]]], None]
    ) -> None:
        """Decode the groups, each by whoever is free.

        Args:
            on_group: called with a group's index and its results as soon as it is done.

        Raises:
            ActorError: decoders died again and again; what was handed to `on_group` stays.
        """
        try:
            ray.get([actor.warm_up.remote(groups[0].prompts[0], sampling) for actor in self.actors])
        except RayActorError as error:
            raise _lost(error) from error
        for index, results in each_done(self.actors, groups, lambda actor, group: actor.decode_group.remote(group, sampling)):
            on_group(index, results)

    def round_costs(self, name: str, batch: int, contexts: Sequence[int], repeats: int) -> list[RoundCost]:
        """One decoder's rounds at some context lengths."""
        try:
            return [ray.get(self.actors[0].round_cost.remote(name, batch, context, repeats)) for context in contexts]
        except RayActorError as error:
            raise _lost(error) from error


def start_decoders(model: str, drafters: Mapping[str, ObjectStore], settings: DecoderSettings, groups: int) -> list[Any]:
    """Decoder actors on a cluster that is up; as many as the settings say, but no more than groups."""
    environment = {**CPU_ENVIRONMENT, **_QUIET, "OMP_NUM_THREADS": str(settings.threads)}
    options = {"num_cpus": settings.threads, "num_gpus": settings.gpus, "runtime_env": {"env_vars": environment}}
    count = max(1, min(settings.actors, groups))
    return [DecoderActor.options(**options).remote(model, dict(drafters), settings) for _ in range(count)]


def each_done(actors: Sequence[Any], groups: Sequence[T], start: Callable[[Any, T], Any]) -> Iterator[tuple[int, Any]]:
    """(index of the group, what came of it), in the order in which they are done, each by whoever is free.

    Args:
        start: begins a group on an actor.

    Raises:
        ActorError: decoders died again and again; what was handed over before stays.
    """
    waiting, idle = list(enumerate(groups))[::-1], list(actors)
    running: dict[Any, tuple[int, Any]] = {}
    while waiting or running:
        while waiting and idle:
            index, group = waiting.pop()
            actor = idle.pop(0)
            running[start(actor, group)] = index, actor
        finished, _ = ray.wait(list(running), num_returns=1)
        index, actor = running.pop(finished[0])
        try:
            done = ray.get(finished[0])
        except RayActorError as error:
            raise _lost(error) from error
        idle.append(actor)
        yield index, done


def _lost(error: RayActorError) -> ActorError:
    if error.actor_init_failed:
        return ActorError(f"a decoder cannot start: {death_reason(error)}")
    return ActorError(
        f"a decoder died {RESTARTS + 1} times ({death_reason(error)}). Finished groups are kept: run the same command again to go on; a "
        "smaller batch_size needs less memory."
    )
