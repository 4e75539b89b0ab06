"""Ray actors that decode prompts with a drafter alone, for the rounds: groups of prompts, each handed over as soon as it is done."""

from collections.abc import Iterator, Sequence

import ray
from ray.exceptions import RayActorError

from actors.cluster import CPU_ENVIRONMENT, death_reason
from actors.decoder import DecoderActor, DecoderSettings, Prompt
from actors.errors import ActorError
from decoding.policies import Policy
from decoding.settings import Generation, SamplingSettings
from storage.object_store import ObjectStore


def decode_groups(
    model: str,
    name: str,
    drafter: ObjectStore,
    groups: Sequence[Sequence[Prompt]],
    sampling: SamplingSettings,
    settings: DecoderSettings,
    policy: Policy | None = None,
) -> Iterator[tuple[int, list[Generation]]]:
    """(number of the group, its generations), in the order in which they are done; whole blocks unless a policy says otherwise."""
    environment = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    options = {"num_cpus": settings.threads, "num_gpus": settings.gpus, "runtime_env": {"env_vars": environment}}
    actors = [DecoderActor.options(**options).remote(model, {name: drafter}, settings) for _ in range(min(settings.actors, len(groups)))]
    waiting = iter(range(len(groups)))
    running = {}
    for actor in actors:
        number = next(waiting)
        running[actor.decode.remote(groups[number], sampling, name, policy)] = (actor, number)
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        actor, number = running.pop(done[0])
        following = next(waiting, None)
        if following is not None:
            running[actor.decode.remote(groups[following], sampling, name, policy)] = (actor, following)
        try:
            generations = ray.get(done[0])
        except RayActorError as error:
            raise ActorError(f"a decoder died too often: {death_reason(error)}. Run the same command again.") from error
        yield number, generations
