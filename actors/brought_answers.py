"""Answers that rows bring along: masked by the chat template, cut to length, and stored beside those that the target gives."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from actors.answers import AnswerStore, Part, write_part
from corpus.answers import FAILED, AnsweredRow, answers_within
from corpus.conversation import Conversation
from corpus.errors import RowRejected
from corpus.masked import cut
from corpus.masks import mask_conversation
from corpus.template import ChatTemplate

BROUGHT = "brought along by the rows"  # in the place of an engine's name
SETTING = "brought_answers"  # among the settings of answers that may hold some
_PART_CONVERSATIONS = 128


@dataclass(frozen=True)
class BroughtSettings:
    """`unstable_template` is the policy of `corpus.masks.mask_conversation`; rows are cut to `max_length` tokens by `corpus.masked.cut`."""

    unstable_template: str
    enable_thinking: bool
    max_length: int


def store_brought_answers(
    conversations: Iterable[Conversation],
    answers: AnswerStore,
    template: ChatTemplate,
    settings: BroughtSettings,
    on_part: Callable[[Part], None],
) -> None:
    """Store the answers of conversations that are not stored yet, in the order of their content hashes. May be killed at any time.

    A conversation without a trustworthy mask is stored as a failed row that says why.
    """
    waiting = sorted({conversation.id: conversation for conversation in conversations}.values(), key=lambda conversation: conversation.id)
    for first in range(0, len(waiting), _PART_CONVERSATIONS):
        started, batch = time.perf_counter(), waiting[first : first + _PART_CONVERSATIONS]
        rows = [row for conversation in batch for row in brought_rows(conversation, template, settings)]
        part = write_part(answers.store, rows, answers.settings, BROUGHT)
        on_part(answers.register(part, time.perf_counter() - started))


def brought_rows(conversation: Conversation, template: ChatTemplate, settings: BroughtSettings) -> list[AnsweredRow]:
    """The supervised answers of one conversation, or one failed row."""
    try:
        masked = mask_conversation(conversation, template, settings.unstable_template, settings.enable_thinking)
    except RowRejected as refused:
        return [_failed(conversation, f"no mask: {refused.reason}")]
    kept = cut(masked, settings.max_length)
    if kept is None:
        return [_failed(conversation, f"no answer of two tokens within max_length={settings.max_length}")]
    given = sum(message.role == "assistant" for message in conversation.messages)
    return answers_within(kept, given - len(masked.spans), template.stop_ids)


def _failed(conversation: Conversation, why: str) -> AnsweredRow:
    nothing = np.zeros(0, dtype=np.int32)
    return AnsweredRow(conversation.id, 0, conversation.source, conversation.domain, nothing, nothing, FAILED, why)
