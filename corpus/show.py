"""Rows as a person checks them: the supervised tokens coloured, everything else dim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from corpus.conversation import Conversation
from corpus.masked import MaskedRow
from corpus.template import ChatTemplate

SUPERVISED_STYLE = "bold green"
OTHER_STYLE = "dim"
CONTROL_STYLE = "reverse"


def row_text(row: MaskedRow, decode: Callable[[Sequence[int]], str], control_ids: Iterable[int] = ()) -> Text:
    """The whole row as text: supervised tokens green, the rest dim, control tokens reversed.

    Args:
        decode: token ids to text with control tokens written out, `ChatTemplate.decode`.
        control_ids: `ChatTemplate.control_ids`; each becomes a piece of its own, so that a typed one is told from a real one.
    """
    return _text(row.input_ids.tolist(), row.loss_mask().tolist(), decode, frozenset(control_ids))


def show_rows(
    rows: Sequence[MaskedRow],
    decode: Callable[[Sequence[int]], str],
    console: Console,
    count: int,
    control_ids: Iterable[int] = (),
) -> None:
    """Print the first `count` rows, each under a line with its id, source and share of supervised tokens."""
    for row in rows[:count]:
        share = row.supervised / len(row.input_ids)
        title = Text(f"{row.row_id}  {row.source}/{row.domain}  {row.supervised} of {len(row.input_ids)} tokens supervised ({share:.0%})")
        console.print(Rule(title, align="left"))
        console.print(row_text(row, decode, control_ids), soft_wrap=True)
    if count:
        console.print(Text("supervised", SUPERVISED_STYLE), Text("not supervised", OTHER_STYLE), Text("control token", CONTROL_STYLE))


def show_prompt(conversation: Conversation, template: ChatTemplate, console: Console, enable_thinking: bool = False) -> None:
    """Print a conversation that waits for the target's answers: the first prompt as the target reads it, then what it is asked later."""
    first, *later = conversation.rounds()
    ids = template.prompt_ids(first, enable_thinking, conversation.tools)
    answers = f"{1 + len(later)} answers to come" if later else "answer to come"
    title = Text(f"{conversation.id}  {conversation.source}/{conversation.domain}  {len(ids)} tokens, {answers}")
    console.print(Rule(title, align="left"))
    text = _text(ids, [False] * len(ids), template.decode, template.control_ids)
    for asked in later:
        text.append("".join(f"\n[then] {message.content}" for message in asked), style=OTHER_STYLE)
    console.print(text, soft_wrap=True)


def _text(ids: Sequence[int], mask: Sequence[bool], decode: Callable[[Sequence[int]], str], control: frozenset[int]) -> Text:
    text = Text()
    start = 0
    for i in range(1, len(ids) + 1):
        same = i < len(ids) and mask[i] == mask[start] and ids[i] not in control and ids[start] not in control
        if same:
            continue
        style = SUPERVISED_STYLE if mask[start] else OTHER_STYLE
        if ids[start] in control:
            style += f" {CONTROL_STYLE}"
        text.append(decode(ids[start:i]), style=style)
        start = i
    return text
