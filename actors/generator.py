"""Lets an engine answer conversations, turn by turn, and writes the rows. Everything stays token ids throughout."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actors.answers import Part, write_part
from actors.engines.base import AnswerEngine, AnswerSettings, EngineSettings
from actors.errors import EngineLost
from corpus.answers import FAILED, STOP, AnsweredRow
from corpus.conversation import Conversation, Message
from corpus.errors import TemplateRefused
from corpus.template import ChatTemplate
from storage.object_store import ObjectStore


@dataclass(frozen=True)
class Fault:
    """A conversation that the engine failed on, and why. None of its rows is written: it may be tried again."""

    conversation_id: str
    reason: str


class Generator:
    """Answers conversations with one engine.

    Args:
        part_rows: a part is written whenever this many rows are finished.
        provenance: kept in every part.
    """

    def __init__(
        self,
        engine: AnswerEngine,
        template: ChatTemplate,
        store: ObjectStore,
        provenance: Mapping[str, Any],
        part_rows: int = 32,
        enable_thinking: bool = False,
    ) -> None:
        self.engine, self.template, self.store, self.provenance = engine, template, store, provenance
        self.part_rows, self.enable_thinking = part_rows, enable_thinking

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Part | Fault]:
        """Answer every user turn, in turn, with the model's own earlier answers between them. Yields parts as they are written.

        A conversation's rows lie in one part, so that it is either answered or not.

        Raises:
            EngineLost: the engine is gone; what it finished has been written and yielded.
        """
        finished: list[AnsweredRow] = []
        dialogues = [_Dialogue(conversation) for conversation in conversations]
        for key, dialogue in enumerate(dialogues):
            if not self._ask(key, dialogue):
                finished += dialogue.rows
        try:
            for key, answer in self.engine.answers():
                dialogue = dialogues[key]
                if answer.finish_reason == FAILED:
                    yield Fault(dialogue.conversation.id, answer.error)
                    continue
                dialogue.answered(answer.token_ids, answer.finish_reason)
                if answer.finish_reason == STOP and dialogue.rest:
                    dialogue.go_on(self.template.answer_text(answer.token_ids))
                    if self._ask(key, dialogue):
                        continue
                finished += dialogue.rows
                if len(finished) >= self.part_rows:
                    yield self._write(finished)
                    finished = []
        except EngineLost:
            if finished:
                yield self._write(finished)
            raise
        if finished:
            yield self._write(finished)

    def close(self) -> None:
        self.engine.close()

    def _ask(self, key: int, dialogue: "_Dialogue") -> bool:
        """Hand the next prompt to the engine; where that cannot be, record why."""
        try:
            prompt = self.template.prompt_ids(dialogue.history, self.enable_thinking, dialogue.conversation.tools)
            problem = ""
            if len(prompt) + 1 >= self.engine.max_length:
                problem = f"the prompt's {len(prompt)} tokens leave no room in max_length={self.engine.max_length}"
        except TemplateRefused as refused:
            prompt, problem = [], str(refused)
        dialogue.prompt = prompt
        if problem:
            dialogue.answered([], FAILED, problem)
        else:
            self.engine.ask(key, prompt)
        return not problem

    def _write(self, rows: Sequence[AnsweredRow]) -> Part:
        return write_part(self.store, rows, self.provenance, self.engine.name)


class VllmGenerator(Generator):
    """The same around a vLLM engine of its own; lives in a Ray actor."""

    def __init__(self, engine: EngineSettings, sampling: AnswerSettings, *rest: Any) -> None:
        from actors.engines.vllm import VllmAnswerEngine

        super().__init__(VllmAnswerEngine(engine, sampling), ChatTemplate(Path(engine.model)), *rest)


@dataclass
class _Dialogue:
    """A conversation on its way: what was said and answered so far, the prompt in question, and the rounds still to come."""

    conversation: Conversation
    history: list[Message] = field(default_factory=list)
    rest: deque[tuple[Message, ...]] = field(default_factory=deque)
    prompt: list[int] = field(default_factory=list)
    rows: list[AnsweredRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rest.extend(self.conversation.rounds())
        self.history.extend(self.rest.popleft())

    def answered(self, answer: Sequence[int], reason: str, error: str = "") -> None:
        self.rows.append(
            AnsweredRow(
                conversation_id=self.conversation.id,
                turn=len(self.rows),
                source=self.conversation.source,
                domain=self.conversation.domain,
                prompt_ids=np.asarray(self.prompt),
                answer_ids=np.asarray(answer),
                finish_reason=reason,
                error=error,
            )
        )

    def go_on(self, answer: str) -> None:
        self.history += [Message("assistant", answer), *self.rest.popleft()]
