"""From a raw row in any of the usual layouts to a `Conversation`, or to a counted reason why not.

Layouts, looked for in this order:

    messages        OpenAI: [{"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"}], with optional "tools"
    conversations   ShareGPT: [{"from", "value"}] or [{"role", "content"}], with optional "system"
    turns           ["first question", "second question"], answered one after another, with optional "system"
    prompt          "a question", or a list of messages

What is repaired (and counted): consecutive user messages become one, an empty system message or an empty last answer goes.
Everything else that is odd drops the row under a reason; guessing would put text into training that nobody wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from corpus.conversation import Conversation, Message, ToolCall, canonical_json, normalize_text
from corpus.errors import RowRejected

LAYOUTS = ("messages", "conversations", "turns", "prompt")

_ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


def parse_row(row: Any, source: str, domain: str, repaired: Counter[str] | None = None) -> Conversation:
    """Turn one decoded JSON value into a conversation.

    Args:
        row: an object in one of the layouts above. Its own `source` and `domain`, where they are text, win over the arguments.
        source: name of the source.
        domain: "math", "code", "chat" or any other label.
        repaired: counter to which repairs are added.

    Raises:
        RowRejected: with `reason` one of wrong_type, no_known_field, no_turns, empty_turn, unknown_role, not_text, invalid_utf8,
            no_user_turn, assistant_first, role_order, system_not_first, tool_without_call, bad_tool_call, bad_tools.
    """
    repaired = Counter() if repaired is None else repaired
    if not isinstance(row, dict):
        raise RowRejected("wrong_type", f"a row is an object, this one is {_kind(row)}")
    layout = next((name for name in LAYOUTS if row.get(name) is not None), None)
    if layout is None:
        held = ", ".join(sorted(map(str, row))[:6]) or "nothing"
        raise RowRejected("no_known_field", f"expected one of {', '.join(LAYOUTS)}; the row holds {held}")
    value = row[layout]
    if layout == "prompt" and isinstance(value, str):
        messages = _with_system(_questions([value]), row)
    elif layout == "turns":
        messages = _with_system(_questions(value), row)
    else:
        messages = _ordered(_with_system(_messages(value, layout), row), repaired)
    own_source, own_domain = _label(row, "source"), _label(row, "domain")
    return Conversation(tuple(messages), own_source or source, own_domain or domain, _tools(row.get("tools")))


def _questions(turns: Any) -> list[Message]:
    if isinstance(turns, str) or not isinstance(turns, list):
        raise RowRejected("wrong_type", f"turns is a list of texts, here it is {_kind(turns)}")
    if not turns:
        raise RowRejected("no_turns", "the list of turns is empty")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, str):
            raise RowRejected("wrong_type", f"turn {number} is {_kind(turn)}, not text")
        text = normalize_text(turn)
        if not text:
            raise RowRejected("empty_turn", f"turn {number} is empty")
        messages.append(Message("user", text))
    return messages


def _with_system(messages: list[Message], row: dict[str, Any]) -> list[Message]:
    """A system prompt that the row keeps beside its messages goes before them; one among them wins."""
    system = row.get("system")
    text = normalize_text(system) if isinstance(system, str) else ""
    return [Message("system", text), *messages] if text and messages[0].role != "system" else messages


def _messages(value: Any, layout: str) -> list[Message]:
    if not isinstance(value, list):
        raise RowRejected("wrong_type", f"{layout} is a list of messages, here it is {_kind(value)}")
    if not value:
        raise RowRejected("no_turns", f"{layout} is empty")
    return [_message(item, number) for number, item in enumerate(value, 1)]


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, dict):
        raise RowRejected("wrong_type", f"message {number} is {_kind(item)}, not an object")
    # Tables give every row every field, null where it has none: null counts as absent.
    name = item.get("role") if item.get("role") is not None else item.get("from")
    if not isinstance(name, str):
        raise RowRejected("unknown_role", f"message {number} has no role")
    role = _ROLE_NAMES.get(name.strip().lower())
    if role is None:
        raise RowRejected("unknown_role", f"message {number} has the role {name!r}; known are {', '.join(_ROLE_NAMES)}")
    text = normalize_text(_text(item["content"] if item.get("content") is not None else item.get("value"), number))
    if role == "function_call":
        return Message("assistant", "", tool_calls=(_sharegpt_call(text, number),))
    calls = tuple(_openai_call(call, number) for call in _list(item.get("tool_calls"), "tool_calls", number))
    if calls and role != "assistant":
        raise RowRejected("bad_tool_call", f"message {number} is by {role}, only the assistant calls tools")
    reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise RowRejected("wrong_type", f"the reasoning of message {number} is {_kind(reasoning)}, not text")
    return Message(
        role,
        text,
        reasoning=normalize_text(reasoning) if role == "assistant" else "",
        tool_calls=calls,
        tool_call_id=_label(item, "tool_call_id"),
        name=_label(item, "name"),
    )


def _text(content: Any, number: int) -> str:
    """The text of a message's content: a string, null (an assistant that only calls tools), or OpenAI's list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected("wrong_type", f"the content of message {number} is {_kind(content)}, not text")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowRejected("not_text", f"message {number} holds a part that is not text")
        parts.append(part["text"])
    return "".join(parts)


def _openai_call(call: Any, number: int) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRejected("bad_tool_call", f"message {number} calls a tool without a name")
    return ToolCall(_clean_json_text(function["name"]), _arguments(function.get("arguments"), number), _label(call, "id"))


def _sharegpt_call(text: str, number: int) -> ToolCall:
    try:
        return _openai_call(json.loads(text), number)
    except ValueError as error:
        raise RowRejected("bad_tool_call", f"message {number} is a function call that is not JSON") from error


def _arguments(arguments: Any, number: int) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise RowRejected("bad_tool_call", f"the arguments of the call in message {number} are not JSON") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowRejected("bad_tool_call", f"the arguments of the call in message {number} are {_kind(arguments)}, not an object")
    return _clean_json_text(canonical_json(arguments))


def _tools(tools: Any) -> tuple[str, ...]:
    if isinstance(tools, str):  # data sets with a fixed schema often store the list as JSON text
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise RowRejected("bad_tools", "the field tools is text that is not JSON") from error
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRejected("bad_tools", f"tools is a list of function definitions, here it is {_kind(tools)}")
    return tuple(_clean_json_text(canonical_json(tool)) for tool in tools)


def _ordered(messages: list[Message], repaired: Counter[str]) -> list[Message]:
    """Check the order of roles, after the repairs that change no meaning."""
    if messages[0].role == "system" and not messages[0].content:
        messages = messages[1:]
        repaired["empty_system_removed"] += 1
    if len(messages) > 1 and messages[-1].role == "assistant" and _is_empty(messages[-1]):
        messages = messages[:-1]
        repaired["empty_last_answer_removed"] += 1
    ordered: list[Message] = []
    for number, message in enumerate(messages, 1):
        if _is_empty(message) and message.role != "tool":  # a tool may well return nothing
            raise RowRejected("empty_turn", f"message {number} ({message.role}) is empty")
        before = ordered[-1] if ordered else None
        if message.role == "user" and before is not None and before.role == "user":
            ordered[-1] = replace(before, content=f"{before.content}\n\n{message.content}")
            repaired["user_turns_joined"] += 1
            continue
        _check_order(before, message, number)
        ordered.append(message)
    if not any(m.role == "user" for m in ordered):
        raise RowRejected("no_user_turn", "the conversation holds no user message")
    return ordered


def _check_order(before: Message | None, message: Message, number: int) -> None:
    if message.role == "system" and before is not None:
        raise RowRejected("system_not_first", f"message {number} is a system message; only the first one can be")
    if message.role == "assistant":
        if before is None or before.role == "system":
            raise RowRejected("assistant_first", "the conversation starts with an answer")
        if before.role == "assistant":
            raise RowRejected("role_order", f"message {number} is an answer after an answer")
    if message.role == "tool":
        follows_call = before is not None and (before.role == "tool" or bool(before.tool_calls))
        if not follows_call:
            raise RowRejected("tool_without_call", f"message {number} is a tool's result, but no call precedes it")
    if message.role == "user" and before is not None and before.tool_calls:
        raise RowRejected("role_order", f"message {number} is a user message where a tool's result is due")


def _is_empty(message: Message) -> bool:
    return not message.content.strip() and not message.tool_calls


def _list(value: Any, what: str, number: int) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowRejected("bad_tool_call", f"{what} of message {number} is {_kind(value)}, not a list")
    return value


def _label(row: Any, name: str) -> str:
    value = row.get(name) if isinstance(row, dict) else None
    return _clean_json_text(value.strip()) if isinstance(value, str) else ""


def _clean_json_text(text: str) -> str:
    """Names and JSON text travel on unchanged, but must be writable as UTF-8 like everything else."""
    normalize_text(text)
    return text


def _kind(value: Any) -> str:
    """A JSON name for the type of a value."""
    if value is None:
        return "null"
    for kind, name in ((bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "text"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return type(value).__name__
