"""Loss masks for conversations that bring their own answers, by prefix difference of the chat template.

For every answer the conversation is rendered twice: up to the answer with the opening of an assistant turn (`prompt`, what the target
reads before it answers), and through the answer (`through`). Where `through` starts with `prompt`, token by token, the tokens in
between up to and including the stop token are what the target would have generated. One row can hold several answers only if
every `through` is in turn a prefix of the whole row. Templates that drop earlier thinking, reorder or trim break that; such
rows are refused or reduced to their last answer, and counted.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corpus.conversation import Conversation, Message
from corpus.errors import CorpusError, MaskRefused, RowRejected
from corpus.masked import MaskedRow
from corpus.template import ChatTemplate

POLICIES = ("refuse", "last_turn")
_THOUGHT_END = "</think>"
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")


@dataclass
class MaskReport:
    """What happened to every conversation that brought answers; token counts are over the kept rows."""

    read: int = 0
    kept: int = 0
    last_turn_only: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens; 0 where no row was kept."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data, reasons sorted by name."""
        return {
            "read": self.read,
            "kept": self.kept,
            "last_turn_only": self.last_turn_only,
            "refused": dict(sorted(self.refused.items())),
            "examples": dict(sorted(self.examples.items())),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "supervised_share": self.supervised_share,
        }


class Masker:
    """Masks conversations one after another and keeps the `report`; the arguments are those of `mask_conversation`."""

    def __init__(self, template: ChatTemplate, policy: str = "refuse", enable_thinking: bool = False) -> None:
        _check_policy(policy)
        self.report = MaskReport()
        self._template, self._policy, self._enable_thinking = template, policy, enable_thinking

    def mask(self, conversation: Conversation) -> MaskedRow:
        """Like `mask_conversation`, and counted; refused ones too."""
        report = self.report
        report.read += 1
        try:
            row = mask_conversation(conversation, self._template, self._policy, self._enable_thinking)
        except RowRejected as refused:
            report.refused[refused.reason] += 1
            report.examples.setdefault(refused.reason, f"{conversation.id}: {refused.detail}")
            raise
        report.kept += 1
        report.last_turn_only += len(row.spans) < sum(m.role == "assistant" for m in conversation.messages)
        report.tokens += len(row.input_ids)
        report.supervised_tokens += row.supervised
        return row


def mask_conversation(
    conversation: Conversation, template: ChatTemplate, policy: str = "refuse", enable_thinking: bool = False
) -> MaskedRow:
    """Token ids and supervised spans of a conversation; the row ends with the stop token of its last answer.

    Args:
        policy: what to do where the template is not prefix-stable over several answers: "refuse", or "last_turn" to supervise the
            last answer alone.
        enable_thinking: whether the prompts invite the target to think, as for `ChatTemplate.prompt_ids`.

    Raises:
        MaskRefused: no_answer, empty_answer, not_prefix_stable, no_stop_token, answer_changed, empty_think_block.
        TemplateRefused: the template raised.
        CorpusError: an unknown policy.
    """
    _check_policy(policy)
    messages = conversation.messages
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        raise MaskRefused("no_answer", "the conversation holds no answer; regenerate it instead")
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    renderer = _Renderer(template, messages, enable_thinking, conversation.tools)
    last_ids, last_span = renderer.answer(answers[-1])
    spans = [last_span]
    try:
        spans = [*(_earlier_span(renderer, i, last_ids) for i in answers[:-1]), last_span]
    except MaskRefused:
        if policy == "refuse":
            raise
    ids = np.asarray(last_ids, dtype=np.int32)
    return MaskedRow(conversation.id, conversation.id, conversation.source, conversation.domain, ids, tuple(spans))


@dataclass(frozen=True)
class _Renderer:
    template: ChatTemplate
    messages: tuple[Message, ...]
    enable_thinking: bool
    tools: tuple[str, ...]

    def answer(self, index: int) -> tuple[list[int], tuple[int, int]]:
        """Token ids through the answer at `index`, cut after its stop token, and the span of the answer in them."""
        message = self.messages[index]
        where = f"answer {index + 1} of {len(self.messages)} messages"
        if not (message.content.strip() or message.tool_calls):
            raise MaskRefused("empty_answer", f"{where} says nothing; the stop token alone would be learned")
        prompt = self.template.prompt_ids(self.messages[:index], self.enable_thinking, self.tools)
        through = self.template.conversation_ids(self.messages[: index + 1], self.enable_thinking, self.tools)
        _require_prefix(prompt, through, f"{where}: the rendered conversation does not continue its own prompt")
        stops = self.template.stop_ids
        stop = next((i for i in range(len(prompt), len(through)) if through[i] in stops), None)
        if stop is None:
            raise MaskRefused("no_stop_token", f"{where}: the template writes no stop token after it")
        text = self.template.decode(through[len(prompt) : stop])
        if _EMPTY_THOUGHT.match(text):
            raise MaskRefused(
                "empty_think_block", f"{where}: thinking is on, but the answer brings no thought; it would be learned as empty"
            )
        if not _says(text, message):
            raise MaskRefused("answer_changed", f"{where}: the template changes its text, to {text[:60]!r}")
        return through[: stop + 1], (len(prompt), stop + 1)


def _earlier_span(renderer: _Renderer, index: int, whole: list[int]) -> tuple[int, int]:
    ids, span = renderer.answer(index)
    _require_prefix(ids, whole, f"answer {index + 1} of {len(renderer.messages)} messages is rendered differently once others follow it")
    return span


def _require_prefix(prefix: list[int], whole: list[int], what: str) -> None:
    if whole[: len(prefix)] == prefix:
        return
    at = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
    raise MaskRefused("not_prefix_stable", f"{what}, from token {at} on")


def _says(text: str, message: Message) -> bool:
    """Whether the rendered answer holds the message's words and thoughts, and nothing else but its tool calls by name and arguments."""
    text = unicodedata.normalize("NFC", text)  # tokenizers may compose characters
    content = unicodedata.normalize("NFC", message.content)
    thought, ends_thought, _ = content.rpartition(_THOUGHT_END)
    thoughts = (unicodedata.normalize("NFC", message.reasoning), thought.replace("<think>", "").strip(), ends_thought)
    if not all(part in text for part in thoughts):
        return False
    said, meant = _visible(text), _visible(content)
    if not message.tool_calls:
        return said == meant
    called = [word for call in message.tool_calls for word in (call.name, *json.loads(call.arguments))]
    return said.startswith(meant) and all(word in said[len(meant) :] for word in called)


def _visible(text: str) -> str:
    """What follows the thinking; line breaks around it are the template's."""
    return text.rpartition(_THOUGHT_END)[2].strip("\n")


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise CorpusError(f"unknown policy {policy!r} for templates that are not prefix-stable. Choose one of {', '.join(POLICIES)}.")
