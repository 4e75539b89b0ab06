"""What the jobs around serving share: a trained drafter, held-out prompts, and how to decode with it here."""

import hashlib
import json
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from actors.cluster import ClusterSettings
from actors.decoder import PLAIN, Decoder, DecoderSettings, Prompt
from corpus.conversation import Conversation
from decoding.target import TransformersTarget
from drafters.drafter import Drafter
from pipelines.drafters import chosen_drafters
from pipelines.job import Job, JobError, notices
from pipelines.machine import decoder_count
from pipelines.prepare import read_conversations
from pipelines.target import Target
from storage.calibration import drafter_hash
from storage.checkpoint import DrafterFiles, load_drafter
from storage.object_store import ObjectStore


class EngineConfig(BaseModel):
    """How decoders run; null for what the machine or the cluster offers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dtype: str = Field(pattern="^(bfloat16|float32)$")
    threads: int | None = Field(ge=1)
    actors: int | None = Field(ge=1)
    gpus: float | None = Field(ge=0)

    def settings(self, cluster: ClusterSettings, batch_size: int) -> DecoderSettings:
        """With what the conf leaves open filled in."""
        return DecoderSettings(*decoder_count(cluster, self.actors, self.threads, self.gpus), self.dtype, batch_size)


class DraftedJob(Job):
    """A job about one trained drafter."""

    run: str
    engine: EngineConfig

    def drafter_store(self, store: ObjectStore) -> ObjectStore:
        return store.child(f"{self.places.run(self.run)}/drafter")

    def open_drafter(self, store: ObjectStore) -> tuple[Target, DrafterFiles]:
        """The target of this machine and the drafter's files, checked against each other."""
        if self.run == PLAIN:
            raise JobError(f"run={PLAIN} is decoding without a drafter, which this job is not about: name a trained run")
        target = self.target.resolve(notices.print)
        chosen_drafters([self.run], [], self.places, store, target, notices.print)
        return target, load_drafter(self.drafter_store(store))

    def decoder(self, store: ObjectStore, target: Target, batch_size: int) -> tuple[TransformersTarget, Drafter]:
        """Target and drafter in this process."""
        settings = self.engine.settings(self.cluster, batch_size)
        held = Decoder(str(target.folder), {self.run: self.drafter_store(store)}, settings)
        return held.targets[self.run], held.drafters[self.run]

    def heldout(self, store: ObjectStore, target: Target, limit: int | None) -> tuple[list[Conversation], list[Prompt]]:
        """Held-out conversations by id, and their first turns as prompts."""
        found = sorted(read_conversations(store.child(self.places.prompts), "heldout"), key=lambda conversation: conversation.id)[:limit]
        if not found:
            raise JobError(
                f"corpus {self.corpus.name} has no held-out prompts. Set corpus.heldout or corpus.heldout_share and prepare again."
            )
        return found, [
            Prompt(int(one.id[:12], 16), tuple(target.template.prompt_ids(one.rounds()[0], self.target.enable_thinking))) for one in found
        ]

    def drafter_key(self, store: ObjectStore, *more: object, prompts: Sequence[Prompt] = ()) -> str:
        """Changes with the drafter's weights, the prompts, and whatever else is given."""
        asked = [[prompt.number, *prompt.token_ids] for prompt in prompts]
        return hashlib.blake2b(json.dumps([drafter_hash(self.drafter_store(store)), asked, repr(more)]).encode(), digest_size=8).hexdigest()
