"""Lets an engine answer conversations, turn by turn, and writes the rows. Everything stays token ids throughout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.answers import Part, write_part
from actors.dialogue import Dialogue
from actors.engines.base import AnswerEngine, AnswerSettings, EngineSettings
from actors.errors import EngineLost
from corpus.answers import FAILED, STOP, AnsweredRow
from corpus.conversation import Conversation
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
        dialogues = [Dialogue(conversation) for conversation in conversations]
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

    def _ask(self, key: int, dialogue: Dialogue) -> bool:
        """Hand the next prompt to the engine; where that cannot be, record why."""
        problem = dialogue.next_prompt(self.template, self.enable_thinking, self.engine.max_length)
        if problem:
            dialogue.answered([], FAILED, problem)
        else:
            self.engine.ask(key, dialogue.prompt)
        return not problem

    def _write(self, rows: Sequence[AnsweredRow]) -> Part:
        return write_part(self.store, rows, self.provenance, self.engine.name)


class VllmGenerator(Generator):
    """The same around a vLLM engine of its own; lives in a Ray actor."""

    def __init__(self, engine: EngineSettings, sampling: AnswerSettings, *rest: Any) -> None:
        from actors.engines.vllm import VllmAnswerEngine

        super().__init__(VllmAnswerEngine(engine, sampling), ChatTemplate(Path(engine.model)), *rest)
