"""The pool that regenerates answers: one driver thread for each engine, in a Ray actor or behind a URL, and nobody's death loses a row."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.answers import AnswerStore, Part
from actors.cluster import death_reason, original_error
from actors.engines.base import AnswerSettings, EngineSettings
from actors.engines.endpoint import EndpointAnswerEngine, EndpointSettings
from actors.engines.vllm import vllm_environment
from actors.errors import ActorError, EngineLost
from actors.generator import Fault, Generator, VllmGenerator
from corpus.conversation import Conversation, Message
from corpus.errors import CorpusError
from corpus.template import ChatTemplate
from storage.errors import StorageError

# A batch that an engine was lost with is tried again in batches this many times smaller, so that one bad row is soon alone.
SHRINK = 32


@dataclass(frozen=True)
class GeneratorSettings:
    """How much an engine is handed at a time, and how often trouble is met with another attempt.

    A conversation that engines failed on, or were lost with, `max_attempts` times is given up; an engine that is lost more often than
    that without an answer in between is given up too. Pauses after a loss start at `pause_seconds` and double.
    """

    batch_conversations: int = 128
    part_rows: int = 32
    enable_thinking: bool = False
    max_attempts: int = 3
    pause_seconds: float = 2


class Answerer(Protocol):
    """What a driver thread holds: a `Generator`, or something that acts like one."""

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Part | Fault]: ...

    def close(self) -> None: ...


MakeAnswerer = Callable[[], Answerer]


def vllm_answerers(
    actors: int, cpus: int, gpus: float, engine: EngineSettings, sampling: AnswerSettings, settings: GeneratorSettings, answers: AnswerStore
) -> list[MakeAnswerer]:
    """`actors` vLLM engines, each in a Ray actor with its CPUs and GPUs."""

    def make() -> Answerer:
        options = {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": vllm_environment(engine)}}
        return _RayAnswerer(
            RayGenerator.options(**options).remote(
                engine, sampling, answers.store, answers.settings, settings.part_rows, settings.enable_thinking
            )
        )

    return [make] * actors


def endpoint_answerers(
    endpoints: Sequence[EndpointSettings],
    template: ChatTemplate,
    sampling: AnswerSettings,
    settings: GeneratorSettings,
    answers: AnswerStore,
) -> list[MakeAnswerer]:
    """One answerer for each server.

    Raises:
        ActorError: a server that cannot be reached, or does not return token ids. All are tried before any is asked.
    """
    probe = template.prompt_ids([Message("user", "Hello!")], settings.enable_thinking)

    def maker(endpoint: EndpointSettings) -> MakeAnswerer:
        def make() -> Answerer:
            engine = EndpointAnswerEngine(endpoint, sampling, probe)
            return Generator(engine, template, answers.store, answers.settings, settings.part_rows, settings.enable_thinking)

        ready = [make()]
        return lambda: ready.pop() if ready else make()

    return [maker(endpoint) for endpoint in endpoints]


RayGenerator: Any = ray.remote(max_restarts=0)(VllmGenerator)


class _RayAnswerer:
    """A generator in a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Part | Fault]:
        try:
            for reference in self.actor.answer.options(num_returns="streaming").remote(conversations):
                yield ray.get(reference)
        except RayActorError as error:
            if error.actor_init_failed:
                raise ActorError(f"the answer engine cannot start: {death_reason(error)}") from error
            raise EngineLost(death_reason(error)) from error
        except RayTaskError as error:
            cause = original_error(error)
            if isinstance(cause, ActorError | CorpusError | StorageError):
                raise cause from error
            # Whatever else an engine raises (out of memory, a device error) leaves it in an unknown state.
            raise EngineLost(f"{type(cause).__name__}: {cause}") from error

    def close(self) -> None:
        ray.kill(self.actor)


def regenerate(
    conversations: Sequence[Conversation],
    answers: AnswerStore,
    answerers: Sequence[MakeAnswerer],
    settings: GeneratorSettings,
    on_part: Callable[[Part], None],
) -> dict[str, str]:
    """Answer what is not answered yet. Every finished part is on storage before it counts, so this may be killed at any time.

    Returns:
        The conversations that were given up, with the reason: nothing of them is stored, and another run tries them again.

    Raises:
        ActorError: an engine cannot start, or all were lost.
    """
    known = answers.conversation_ids()
    # Sorted by content hash: the order of the input changes nothing. Equal conversations share their answers.
    missing = {conversation.id: conversation for conversation in conversations if conversation.id not in known}
    pool = _Pool([missing[name] for name in sorted(missing)], answers, settings, on_part)
    pool.run(answerers[: len(missing)])
    return pool.given_up


def even_share(conversations: int, engines: int, most: int) -> int:
    """Size of equal batches, at most `most`, as many for each engine: none of them is busy with the last one alone."""
    rounds = max(1, math.ceil(conversations / (engines * most)))
    return max(1, math.ceil(conversations / (engines * rounds)))


class _Pool:
    """Takes batches, registers the parts as they come, and hands on what a lost engine left undone."""

    def __init__(
        self, missing: Sequence[Conversation], answers: AnswerStore, settings: GeneratorSettings, on_part: Callable[[Part], None]
    ) -> None:
        self.answers, self.settings, self.on_part = answers, settings, on_part
        self.pending = deque(missing)
        self.open = len(missing)  # neither answered nor given up
        self.attempts: Counter[str] = Counter()
        self.given_up: dict[str, str] = {}
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.registered = time.perf_counter()

    def run(self, answerers: Sequence[MakeAnswerer]) -> None:
        self.share = even_share(len(self.pending), max(len(answerers), 1), self.settings.batch_conversations)
        self.working = len(answerers)
        threads = [threading.Thread(target=self._work, args=(make,), daemon=True) for make in answerers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _work(self, make: MakeAnswerer) -> None:
        answerer: Answerer | None = None
        losses = 0
        try:
            while batch := self._take():
                made = answerer is not None
                try:
                    answerer = answerer or make()
                    made = True
                    for item in answerer.answer(list(batch.values())):
                        self._settle(item, batch)
                        losses = 0
                    self._give_back(batch, "the engine gave no answer", blamed=True)
                except EngineLost as lost:
                    losses += 1
                    if answerer is not None:
                        answerer.close()
                        answerer = None
                    # Only an engine that was there can have been lost through what it was asked.
                    self._give_back(batch, str(lost), blamed=made)
                    if not self._stay(losses, lost):
                        return
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()
        finally:
            if answerer is not None:
                answerer.close()

    def _take(self) -> dict[str, Conversation]:
        """The next batch; empty when all is done. Waits while others hold what is left, for it may come back."""
        with self.changed:
            self.changed.wait_for(lambda: self.error or self.pending or not self.open)
            batch: dict[str, Conversation] = {}
            while self.pending and not self.error and len(batch) < self._batch_size(self.pending[0]):
                conversation = self.pending.popleft()
                batch[conversation.id] = conversation
            return batch

    def _batch_size(self, conversation: Conversation) -> int:
        return max(1, self.share // SHRINK ** self.attempts[conversation.id])

    def _settle(self, item: Part | Fault, batch: dict[str, Conversation]) -> None:
        if isinstance(item, Fault):
            self._give_back({item.conversation_id: batch.pop(item.conversation_id)}, item.reason, blamed=True)
            return
        with self.changed:
            now = time.perf_counter()
            part = self.answers.register(item, now - self.registered)
            self.registered = now
            self.on_part(part)
            for conversation_id in part.conversation_ids:
                batch.pop(conversation_id, None)
            self.open -= len(part.conversation_ids)
            self.changed.notify_all()

    def _give_back(self, conversations: dict[str, Conversation], reason: str, blamed: bool) -> None:
        """To be tried again, by whomever, unless they were blamed for trouble too often."""
        with self.changed:
            for name, conversation in conversations.items():
                self.attempts[name] += blamed
                if self.attempts[name] < self.settings.max_attempts:
                    self.pending.append(conversation)
                else:
                    self.given_up[name] = reason
                    self.open -= 1
            self.changed.notify_all()

    def _stay(self, losses: int, lost: EngineLost) -> bool:
        """Whether a thread whose engine was lost makes another one, after a pause. The last to leave says why nobody is left."""
        with self.changed:
            if losses <= self.settings.max_attempts:
                self.changed.wait_for(lambda: self.error or not self.open, self.settings.pause_seconds * 2 ** (losses - 1))
                return True
            self.working -= 1
            if not self.working and self.open:
                self.error = ActorError(
                    f"no answer engine is left, the last was lost {losses} times in a row: {lost} What is answered is kept; run "
                    "`python -m pipelines.regenerate` again to go on."
                )
            return False
