"""Ray actors that decode prompts with a drafter alone, for the rounds: groups of prompts, each handed over as soon as it is done."""

from collections.abc import Iterator, Sequence

from actors.decoder import DecoderSettings, Prompt, each_done, start_decoders
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
    actors = start_decoders(model, {name: drafter}, settings, len(groups))
    yield from each_done(actors, groups, lambda actor, group: actor.decode.remote(group, sampling, name, policy))
