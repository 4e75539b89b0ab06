"""A conversation while the target answers it, turn by turn."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from corpus.answers import AnsweredRow
from corpus.conversation import Conversation, Message
from corpus.errors import TemplateRefused
from corpus.template import ChatTemplate


@dataclass
class Dialogue:
    """What was said and answered so far, the prompt in question, and the rounds still to come."""

    conversation: Conversation
    history: list[Message] = field(default_factory=list)
    rest: deque[tuple[Message, ...]] = field(default_factory=deque)
    prompt: list[int] = field(default_factory=list)
    rows: list[AnsweredRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rest.extend(self.conversation.rounds())
        self.history.extend(self.rest.popleft())

    def next_prompt(self, template: ChatTemplate, enable_thinking: bool, max_length: int) -> str:
        """Set `prompt` to the next one's ids; returns why it cannot be answered (empty if it can)."""
        try:
            self.prompt = template.prompt_ids(self.history, enable_thinking, self.conversation.tools)
        except TemplateRefused as refused:
            self.prompt = []
            return str(refused)
        if len(self.prompt) + 1 >= max_length:
            return f"the prompt's {len(self.prompt)} tokens leave no room in max_length={max_length}"
        return ""

    def answered(self, answer: Sequence[int], reason: str, error: str = "") -> None:
        """Note one answer, or why there is none."""
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
        """Go on to the next round, after the answer's text."""
        self.history += [Message("assistant", answer), *self.rest.popleft()]
