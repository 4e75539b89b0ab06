"""A vLLM engine in a Ray actor, to time its passes."""

from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.cluster import death_reason
from actors.engines.base import EngineSettings
from actors.engines.pass_timer import PassTimes, VllmPassTimer
from actors.engines.vllm import vllm_environment
from actors.errors import ActorError


def vllm_passes(
    settings: EngineSettings,
    gpus: float,
    context: int,
    sizes: Sequence[tuple[int, Sequence[int]]],
    rounds: int,
    warmup: int,
    seed: int,
) -> Iterator[PassTimes]:
    """Times for each (requests, tokens of its passes), one after the other on one engine.

    Raises:
        ActorError: the engine cannot start, or died.
    """
    options = {"num_cpus": settings.threads, "num_gpus": gpus, "runtime_env": {"env_vars": vllm_environment(settings)}}
    actor: Any = ray.remote(VllmPassTimer)
    timer = actor.options(**options).remote(settings, context, seed)
    try:
        for requests, tokens in sizes:
            yield ray.get(timer.times.remote(requests, tokens, rounds, warmup))
    except RayActorError as error:
        raise ActorError(f"the vLLM engine died: {death_reason(error)}") from error
