"""A conversation: the one record type that every prompt source is turned into.

Two hashes with two jobs:

- `Conversation.id` is the content hash over the normalized messages and tools. Regeneration resumes by it. It depends on nothing
  else: not on the row's place in its file, not on the source's name, not on the domain.
- `near_key` is coarser (every run of whitespace counts as one space): two conversations with the same key are duplicates.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from corpus.errors import RowRejected

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A function call made by the assistant. `arguments` is canonical JSON (sorted keys, no spaces)."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Message:
    """One turn. `reasoning` is an assistant's thinking where the source keeps it apart from the answer."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """The dictionary form that chat templates expect (Hugging Face's convention: call arguments as objects)."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            row["reasoning_content"] = self.reasoning
        if self.tool_calls:
            row["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id:
            row["tool_call_id"] = self.tool_call_id
        if self.name:
            row["name"] = self.name
        return row


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
    if call.id:
        row["id"] = call.id
    return row


@dataclass(frozen=True)
class Conversation:
    """Normalized messages with their content-hash id.

    A row that only asks (`turns`, `prompt`) holds user messages one after another; the target answers between them. A row that brings
    its own answers alternates user and assistant messages. `tools` are function definitions, each as canonical JSON.
    """

    messages: tuple[Message, ...]
    source: str
    domain: str
    tools: tuple[str, ...] = ()
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", _digest(_content(self.messages, self.tools)))

    @cached_property
    def near_key(self) -> str:
        """Equal for conversations that differ in whitespace only."""
        return _digest(collapse_whitespace(_content(self.messages, self.tools, collapse_whitespace)))

    @cached_property
    def split_key(self) -> str:
        """Hash of the first question alone, case and whitespace ignored: what shares a question lands in the same part of a split."""
        first = next((m.content for m in self.messages if m.role == "user"), "")
        return _digest(collapse_whitespace(first).casefold())

    @property
    def brings_answers(self) -> bool:
        """True where the last message is the assistant's, so that a mask can be made without regeneration."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def questions(self) -> Conversation:
        """This conversation as the target will be asked it: its `rounds` without the answers that came with the row."""
        if not any(m.role == "assistant" for m in self.messages):
            return self
        return Conversation(tuple(message for asked in self.rounds() for message in asked), self.source, self.domain, self.tools)

    def rounds(self) -> tuple[tuple[Message, ...], ...]:
        """What the target must read before each answer it gives, in order; answers that came with the row are left out.

        Tool results belong to the calls they answer. So a conversation that holds any becomes one round, everything up to the last
        message that is not an answer, with the earlier answers kept.
        """
        if any(m.role == "tool" for m in self.messages):
            last = max(i for i, m in enumerate(self.messages) if m.role != "assistant")
            return (self.messages[: last + 1],)
        rounds: list[list[Message]] = [[]]
        for message in self.messages:
            if message.role == "assistant":
                continue
            if any(m.role == "user" for m in rounds[-1]):
                rounds.append([])
            rounds[-1].append(message)
        return tuple(tuple(r) for r in rounds)

    def to_row(self) -> dict[str, Any]:
        """Plain data that `corpus.rows.parse_row` turns back into this conversation, its id included."""
        row: dict[str, Any] = {"id": self.id, "source": self.source, "domain": self.domain}
        system, asked = _split_system(self.messages)
        # As `messages`, questions one after another would be taken for one.
        if all(m.role == "user" and not m.name for m in asked):
            row |= {"system": system} if system else {}
            row["turns"] = [m.content for m in asked]
        else:
            row["messages"] = [m.for_template() for m in self.messages]
        if self.tools:
            row["tools"] = [json.loads(tool) for tool in self.tools]
        return row


def _split_system(messages: tuple[Message, ...]) -> tuple[str, tuple[Message, ...]]:
    """The text of a plain system message at the start, empty where there is none, and the messages after it."""
    if messages and messages[0].role == "system" and not messages[0].name:
        return messages[0].content, messages[1:]
    return "", messages


def normalize_text(text: str) -> str:
    """Windows and old Mac line ends become newlines; blank lines at the start and whitespace at the end go.

    Indentation inside the text and on its first line stays: it is meaning in code.

    Raises:
        RowRejected: `invalid_utf8`, where the text holds lone surrogates (JSON can smuggle them in) or NUL characters.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowRejected("invalid_utf8", f"character {error.start} cannot be written as UTF-8") from error
    if "\x00" in text:
        raise RowRejected("invalid_utf8", "the text holds a NUL character; is it binary data?")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", text).rstrip()


def collapse_whitespace(text: str) -> str:
    """Every run of whitespace becomes one space, none at the ends."""
    return " ".join(text.split())


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _content(messages: tuple[Message, ...], tools: tuple[str, ...], clean: Any = str) -> str:
    rows = [
        [m.role, clean(m.content), clean(m.reasoning), [[c.name, c.arguments, c.id] for c in m.tool_calls], m.tool_call_id, m.name]
        for m in messages
    ]
    return canonical_json([rows, list(tools)])


def _digest(text: str) -> str:
    """128 bits are enough for any corpus: at 10^9 rows a collision has probability 10^-21."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
