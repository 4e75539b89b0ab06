"""Ray actors that let the target answer prompts, and the pool that feeds them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from actors.answers import AnswerStore, Part, write_part
from actors.cluster import death_reason
from actors.engines.base import EngineSettings
from actors.engines.vllm import AnswerSettings, VllmAnswerEngine, vllm_environment
from actors.errors import ActorError
from corpus.answers import FAILED, STOP, AnsweredRow
from corpus.conversation import Conversation, Message
from corpus.errors import TemplateRefused
from corpus.template import ChatTemplate
from storage.object_store import ObjectStore


@dataclass(frozen=True)
class GeneratorSettings:
    """`actors` engines; each takes `batch_conversations` at a time and writes a part for every `part_rows` finished rows."""

    actors: int = 1
    cpus: int = 1
    gpus: float = 0
    batch_conversations: int = 128
    part_rows: int = 32
    max_attempts: int = 3
    enable_thinking: bool = False


class Generator:
    """One vLLM engine. Prompts, answers and rows stay token ids throughout."""

    def __init__(
        self,
        engine: EngineSettings,
        answers: AnswerSettings,
        settings: GeneratorSettings,
        store: ObjectStore,
        provenance: Mapping[str, Any],
    ) -> None:
        self.settings, self.store, self.provenance = settings, store, provenance
        self.template = ChatTemplate(Path(engine.model))
        self.engine = VllmAnswerEngine(engine, answers)

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Part]:
        """Answer every user turn, in turn, with the model's own earlier answers between them. Yields parts as they are written.

        A conversation's rows lie in one part, so that it is either answered or not.
        """
        finished: list[AnsweredRow] = []
        asked = [_Dialogue(conversation) for conversation in conversations]
        while asked:
            running: list[tuple[_Dialogue, list[int]]] = []
            for dialogue in asked:
                prompt, problem = self._prompt(dialogue)
                if problem:
                    dialogue.answered(prompt, [], FAILED, problem)
                    finished += dialogue.rows
                else:
                    running.append((dialogue, prompt))
            asked = []
            for index, answer in self.engine.answer([prompt for _, prompt in running]):
                dialogue, prompt = running[index]
                dialogue.answered(prompt, answer.token_ids, answer.finish_reason)
                if answer.finish_reason == STOP and dialogue.rest:
                    dialogue.ask_next(self.template.answer_text(answer.token_ids))
                    asked.append(dialogue)
                else:
                    finished += dialogue.rows
                if len(finished) >= self.settings.part_rows:
                    yield write_part(self.store, finished, self.provenance)
                    finished = []
        if finished:
            yield write_part(self.store, finished, self.provenance)

    def _prompt(self, dialogue: "_Dialogue") -> tuple[list[int], str]:
        """The next prompt's ids, and why it cannot be answered (empty if it can)."""
        try:
            prompt = self.template.prompt_ids(dialogue.history, self.settings.enable_thinking, dialogue.conversation.tools)
        except TemplateRefused as refused:
            return [], str(refused)
        too_long = len(prompt) + 1 >= self.engine.max_length
        return prompt, f"the prompt's {len(prompt)} tokens leave no room in max_length={self.engine.max_length}" if too_long else ""


AnswerGenerator: Any = ray.remote(max_restarts=0)(Generator)


@dataclass
class _Dialogue:
    """A conversation on its way: what was said and answered so far, and the rounds still to come."""

    conversation: Conversation
    history: list[Message] = field(default_factory=list)
    rest: deque[tuple[Message, ...]] = field(default_factory=deque)
    rows: list[AnsweredRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rest.extend(self.conversation.rounds())
        self.history.extend(self.rest.popleft())

    def answered(self, prompt: Sequence[int], answer: Sequence[int], reason: str, error: str = "") -> None:
        self.rows.append(
            AnsweredRow(
                conversation_id=self.conversation.id,
                turn=len(self.rows),
                source=self.conversation.source,
                domain=self.conversation.domain,
                prompt_ids=np.asarray(prompt),
                answer_ids=np.asarray(answer),
                finish_reason=reason,
                error=error,
            )
        )

    def ask_next(self, answer: str) -> None:
        self.history += [Message("assistant", answer), *self.rest.popleft()]


def regenerate(
    conversations: Sequence[Conversation],
    answers: AnswerStore,
    engine: EngineSettings,
    sampling: AnswerSettings,
    settings: GeneratorSettings,
    on_part: Callable[[Part], None],
) -> None:
    """Answer what is not answered yet. Every finished part is on storage before the next begins, so it may be killed at any time.

    Raises:
        ActorError: an engine cannot start, or died `max_attempts` times.
    """
    known = answers.conversation_ids()
    # Sorted by content hash: the order of the input changes nothing.
    pending = deque(sorted((c for c in conversations if c.id not in known), key=lambda c: c.id))
    pool = _Pool(pending, answers, engine, sampling, settings, on_part)
    pool.run(min(settings.actors, len(pending)))


class _Pool:
    """One driver thread for each actor: takes a batch, registers the parts as they come, gives back what a dead actor left undone."""

    def __init__(
        self,
        pending: deque[Conversation],
        answers: AnswerStore,
        engine: EngineSettings,
        sampling: AnswerSettings,
        settings: GeneratorSettings,
        on_part: Callable[[Part], None],
    ) -> None:
        self.pending, self.answers, self.settings, self.on_part = pending, answers, settings, on_part
        self.spawn = lambda: AnswerGenerator.options(
            num_cpus=settings.cpus, num_gpus=settings.gpus, runtime_env={"env_vars": vllm_environment(engine)}
        ).remote(engine, sampling, settings, answers.store, answers.settings)
        self.lock = threading.Lock()
        self.deaths = 0
        self.error: BaseException | None = None

    def run(self, workers: int) -> None:
        # An even share for each, so that the last batch does not keep one actor busy alone.
        self.share = max(1, min(self.settings.batch_conversations, -(-len(self.pending) // max(workers, 1))))
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        actor = None
        try:
            while self.error is None and (batch := self._take()):
                actor = actor or self.spawn()
                left = {conversation.id: conversation for conversation in batch}
                try:
                    for reference in actor.answer.options(num_returns="streaming").remote(batch):
                        self._register(ray.get(reference), left)
                except RayActorError as error:
                    actor = None
                    self._give_back(left, error)
        except BaseException as error:
            self.error = error
        finally:
            if actor is not None:
                ray.kill(actor)

    def _take(self) -> list[Conversation]:
        with self.lock:
            return [self.pending.popleft() for _ in range(min(self.share, len(self.pending)))]

    def _register(self, part: Part, left: dict[str, Conversation]) -> None:
        with self.lock:
            self.answers.register(part)
            self.on_part(part)
        for conversation_id in part.conversation_ids:
            left.pop(conversation_id, None)

    def _give_back(self, left: dict[str, Conversation], error: RayActorError) -> None:
        with self.lock:
            if error.actor_init_failed:
                raise ActorError(f"the answer engine cannot start: {death_reason(error)}") from error
            self.deaths += 1
            if self.deaths >= self.settings.max_attempts * max(1, self.settings.actors):
                raise ActorError(
                    f"the answer engines died {self.deaths} times, last: {death_reason(error)}. Run `python -m pipelines.doctor`."
                ) from error
            self.pending.extend(left.values())
