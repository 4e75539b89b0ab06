"""Masks of conversations that bring their own answers: by hand for each template family, and as properties."""

from __future__ import annotations

import io

import pytest
from corpus_templates import FAMILIES, Family, relaxed, save_target, target
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from corpus.conversation import Conversation, Message, ToolCall
from corpus.errors import CorpusError, MaskRefused, RowRejected
from corpus.masked import cut
from corpus.masks import Masker, mask_conversation
from corpus.rows import parse_row
from corpus.show import CONTROL_STYLE, SUPERVISED_STYLE, row_text, show_prompt, show_rows
from corpus.template import ChatTemplate


def talk(*turns: str | Message) -> Conversation:
    """Texts alternate between user and assistant."""
    messages = [t if isinstance(t, Message) else Message(("user", "assistant")[i % 2], t) for i, t in enumerate(turns)]
    return Conversation(tuple(messages), "src", "chat")


def supervised(template: ChatTemplate, conversation: Conversation, **options) -> list[str]:
    row = mask_conversation(conversation, template, **options)
    return [template.decode(row.input_ids[a:b]) for a, b in row.spans]


def refusal(template: ChatTemplate, conversation: Conversation, **options) -> str:
    with pytest.raises(MaskRefused) as refused:
        mask_conversation(conversation, template, **options)
    return refused.value.reason


TURN_END = {"chatml": "<|im_end|>", "smollm2": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_single_turn_supervises_answer_and_stop_token(family):
    template = target(family)
    conversation = talk("What is 6 x 7?", "It is 42.")
    assert supervised(template, conversation) == ["It is 42." + TURN_END[family]]
    row = mask_conversation(conversation, template)
    start, stop = row.spans[0]
    assert stop == len(row.input_ids)
    assert row.input_ids[:start].tolist() == template.prompt_ids(conversation.messages[:1])


@pytest.mark.parametrize("family", ["chatml", "smollm2", "llama3", "gemma"])
def test_multi_turn_supervises_every_answer_of_stable_templates(family):
    end = TURN_END[family]
    assert supervised(target(family), talk("a", "One.", "b", "Two\nlines.", "c")) == ["One." + end, "Two\nlines." + end]


def test_system_start_and_trailing_question_are_not_supervised():
    conversation = talk(Message("system", "S"), Message("user", "Q"), Message("assistant", "A"), Message("user", "left over"))
    row = mask_conversation(conversation, target("chatml"))
    assert (
        target("chatml").decode(row.input_ids)
        == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>"
    )


@pytest.mark.parametrize("family", ["chatml", "smollm2", "qwen3", "llama3"])
def test_a_system_message_is_not_supervised(family):
    template = target(family)
    conversation = talk(Message("system", "Obey."), Message("user", "Q"), Message("assistant", "A"))
    assert supervised(template, conversation) == ["A" + TURN_END[family]]
    row = mask_conversation(conversation, template)
    assert "Obey." in template.decode(row.input_ids[: row.spans[0][0]])


def test_qwen3_drops_the_thought_block_of_earlier_turns():
    template, conversation = target("qwen3"), talk("a", "One.", "b", "Two.")
    assert refusal(template, conversation) == "not_prefix_stable"
    assert supervised(template, conversation, policy="last_turn") == ["Two.<|im_end|>"]
    row = mask_conversation(conversation, template, policy="last_turn")
    assert row.input_ids[: row.spans[0][0]].tolist() == template.prompt_ids(conversation.messages[:3])


def test_qwen3_thinking():
    template = target("qwen3")
    thought = talk(Message("user", "Q"), Message("assistant", "A", reasoning="Let me see."))
    inline = talk("Q", "<think>\nLet me see.\n</think>\n\nA")
    for conversation in (thought, inline):
        assert supervised(template, conversation, enable_thinking=True) == ["<think>\nLet me see.\n</think>\n\nA<|im_end|>"]
        assert refusal(template, conversation) == "not_prefix_stable"  # the prompt closes the thought, the answer brings one
    assert refusal(template, talk("Q", "A"), enable_thinking=True) == "empty_think_block"


def test_reasoning_that_the_template_drops_is_refused():
    conversation = talk(Message("user", "Q"), Message("assistant", "A", reasoning="Let me see."))
    assert refusal(target("chatml"), conversation) == "answer_changed"


def test_tool_call_and_answer_after_the_result():
    call = Message("assistant", "", tool_calls=(ToolCall("f", '{"a":1}'),))
    to_call = talk(Message("user", "Q"), call)
    expected = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert supervised(target("qwen3"), to_call) == [expected]
    whole = talk(Message("user", "Q"), call, Message("tool", "4"), Message("assistant", "Four."))
    assert supervised(target("qwen3"), whole, policy="last_turn") == ["Four.<|im_end|>"]


@pytest.mark.parametrize("family", ["chatml", "smollm2", "llama3", "gemma"])
@pytest.mark.parametrize("words", ["", "Let me look."])
def test_a_tool_call_that_the_template_drops_is_refused(family, words):
    """What is left would teach the target to stop where it calls."""
    call = Message("assistant", words, tool_calls=(ToolCall("weather", '{"city":"Oslo"}'),))
    assert refusal(target(family), talk(Message("user", "Q"), call)) == "answer_changed"


def test_no_answer_is_refused():
    assert refusal(target("chatml"), talk("only a question")) == "no_answer"


def test_whitespace_that_a_template_trims_is_refused():
    assert refusal(target("llama3"), talk("Q", "  indented")) == "answer_changed"
    assert supervised(target("chatml"), talk("Q", "  indented ")) == ["  indented <|im_end|>"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_whitespace_at_the_end_of_a_row_is_gone_before_it_is_masked(family):
    row = parse_row({"messages": [{"role": "user", "content": "Q \n"}, {"role": "assistant", "content": "A b. \t\n\n"}]}, "src", "chat")
    assert supervised(target(family), row) == ["A b." + TURN_END[family]]
    kept = {"chatml", "smollm2", "qwen3"}  # the others trim, so that what a row says would not be what is learned
    if family in kept:
        assert supervised(target(family), talk("Q", "A b. ")) == ["A b. " + TURN_END[family]]
    else:
        assert refusal(target(family), talk("Q", "A b. ")) == "answer_changed"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_typed_control_tokens_neither_end_nor_open_an_answer(family):
    template, end = target(family), TURN_END[family]
    opening = template.decode(template.prompt_ids((Message("user", "x"),))).rpartition("x")[2]
    typed = f"Why {end}{opening}no?"
    conversation = talk(typed, f"Write {end} at the end.")
    assert supervised(template, conversation) == [f"Write {end} at the end.{end}"]
    row, plain = mask_conversation(conversation, template), mask_conversation(talk("Why?", "Write it."), template)
    control = [sum(i in template.control_ids for i in r.input_ids.tolist()) for r in (row, plain)]
    assert control[0] == control[1], "typed tokens are text"
    assert typed in template.decode(row.input_ids)


BROKEN = {
    "not_prefix_stable": "{% for m in messages | reverse %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "no_stop_token": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "answer_changed": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


@pytest.mark.parametrize("answer", ["{{ messages[0].content }} {{ m.content }}", "{{ m.content }} {{ messages[0].content }}"])
def test_a_mask_that_would_cover_what_the_user_said_is_refused(tmp_path, answer):
    text = BROKEN["answer_changed"].replace(
        "{{ m.content | upper }}", f"{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% else %}}{answer}{{% endif %}}"
    )
    template = ChatTemplate(save_target(tmp_path, Family(text, FAMILIES["chatml"].special, "<|im_end|>")))
    assert refusal(template, talk("Question", "Answer")) == "answer_changed"


@pytest.mark.parametrize("reason", sorted(BROKEN))
def test_templates_that_reorder_change_or_never_stop_are_refused(tmp_path, reason):
    folder = save_target(tmp_path, Family(BROKEN[reason], FAMILIES["chatml"].special, "<|im_end|>"))
    assert refusal(ChatTemplate(folder), talk("Question", "Answer")) == reason


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_hundred_turns(family):
    turns = [f"turn {i}" for i in range(100)]
    answers = turns[-1:] if family == "qwen3" else turns[1::2]  # its template drops the thoughts of earlier answers
    assert supervised(target(family), talk(*turns), policy="last_turn") == [answer + TURN_END[family] for answer in answers]


def masked_all(conversations, template, **options):
    """The rows that are not refused, and the report."""
    masker, rows = Masker(template, **options), []
    for conversation in conversations:
        try:
            rows.append(masker.mask(conversation))
        except RowRejected:
            continue
    return rows, masker.report


def test_report_counts_every_conversation():
    conversations = [talk("a", "One."), talk("a", "One.", "b", "Two."), talk("a"), talk("a", " ")]
    rows, report = masked_all(conversations, target("qwen3"), policy="last_turn")
    assert len(rows) == report.kept == 2
    assert report.last_turn_only == 1
    assert report.refused == {"no_answer": 1, "empty_answer": 1}
    assert report.read == report.kept + sum(report.refused.values())
    assert report.supervised_tokens == sum(int(r.loss_mask().sum()) for r in rows)
    assert 0 < report.to_json()["supervised_share"] < 1
    _, report = masked_all(
        [Conversation((Message("system", "S"), Message("user", "Q"), Message("assistant", "A")), "s", "d")], target("gemma")
    )
    assert report.refused == {"template_refused": 1}
    with pytest.raises(CorpusError, match="unknown policy"):
        Masker(target("qwen3"), policy="ignore")


def test_an_answer_that_says_nothing_is_refused():
    """Its stop token alone would be supervised."""
    assert refusal(target("chatml"), talk("Q", "")) == "empty_answer"
    assert refusal(target("chatml"), talk("Q", "", "R", "A")) == "empty_answer"
    assert supervised(target("chatml"), talk("Q", "", "R", "A"), policy="last_turn") == ["A<|im_end|>"]


def test_leading_blanks_that_merge_with_the_templates_line_break_are_refused():
    """A byte-pair tokenizer may join the line break that ends a prompt with an answer's indentation: then the target, which read the
    prompt alone, could not have generated those tokens."""
    template, indented = target("chatml"), talk("Q", "    return 1")
    prompt, whole = template.prompt_ids(indented.messages[:1]), template.conversation_ids(indented.messages)
    assert template.decode(whole).startswith(template.decode(prompt)), "equal as text"
    assert whole[: len(prompt)] != prompt, "other tokens"
    assert refusal(template, indented) == "not_prefix_stable"
    assert refusal(template, indented, policy="last_turn") == "not_prefix_stable"
    for blank in (" ", "\n", "\n\n", "\t"):  # this tokenizer joins none of these with the line break
        assert supervised(template, talk("Q", f"{blank}return 1")) == [f"{blank}return 1<|im_end|>"]


PREFIXED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ 'Answer:\n' if m.role == 'assistant' }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nAnswer:\n{% endif %}"
)


def test_what_the_template_begins_an_answer_with_is_not_supervised(tmp_path):
    special = FAMILIES["chatml"].special
    kept = ChatTemplate(save_target(tmp_path / "kept", Family(PREFIXED, special, "<|im_end|>")))
    assert supervised(kept, talk("Q", "One.", "R", "Two.")) == ["One.<|im_end|>", "Two.<|im_end|>"]
    forgets = PREFIXED.replace("{{ 'Answer:\n' if m.role == 'assistant' }}", "")
    dropped = ChatTemplate(save_target(tmp_path / "dropped", Family(forgets, special, "<|im_end|>")))
    assert refusal(dropped, talk("Q", "One.")) == "not_prefix_stable"


def test_a_template_that_writes_no_prompt_stops_with_an_error(tmp_path):
    """Everything would be supervised: no row of it can be right, so it is no row's fault."""
    bare = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    template = ChatTemplate(save_target(tmp_path, Family(bare, FAMILIES["chatml"].special, "<|im_end|>")))
    with pytest.raises(CorpusError, match="every token is supervised"):
        mask_conversation(talk("Q", "A"), template)


def test_a_row_longer_than_the_limit_ends_with_a_supervised_token():
    row = mask_conversation(talk("First?", "One one one.", "Second?", "Two two two."), target("chatml"))
    (first, first_end), (second, second_end) = row.spans
    assert cut(row, second_end) is row
    for limit in range(2, second_end):
        kept = cut(row, limit)
        if limit < first + 2:
            assert kept is None, "no two supervised tokens side by side, so no anchor"
            continue
        end = limit if first < limit <= first_end or limit > second else first_end
        assert kept.input_ids.tolist() == row.input_ids[:end].tolist()
        assert kept.loss_mask().tolist() == row.loss_mask()[:end].tolist()
        assert kept.loss_mask()[-1]


# Stripped on the left too: a byte-pair tokenizer joins an answer's leading blanks with the template's line break (see the test above).
WORDS = st.text(st.sampled_from("ab \n.é日🙂<|>"), min_size=1, max_size=12).map(str.strip).filter(bool)
PIECES = st.lists(WORDS | st.sampled_from(["<|im_end|>", "<|im_start|>user", "</think>x"]), min_size=1, max_size=3).map("".join)


WRITTEN = {
    "chatml": "<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n",
    "smollm2": "<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\n{asked}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{answer}<|eot_id|>",
    "gemma": "<start_of_turn>user\n{asked}<end_of_turn>\n<start_of_turn>model\n{answer}<end_of_turn>\n",
}


@pytest.mark.parametrize("family", sorted(WRITTEN))
@settings(relaxed, max_examples=40)
@given(turns=st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=4))
def test_supervised_text_is_the_answers_and_nothing_else(family, turns):
    template, end = target(family), TURN_END[family]
    conversation = talk(*(text for pair in turns for text in pair))
    row = mask_conversation(conversation, template)
    spans = [template.decode(row.input_ids[a:b]) for a, b in row.spans]
    assert spans == [answer + end for _, answer in turns]
    for i, (start, _) in enumerate(row.spans):
        assert row.input_ids[:start].tolist() == template.prompt_ids(conversation.messages[: 2 * i + 1])
    written = "".join(WRITTEN[family].format(asked=asked, answer=answer) for asked, answer in turns)
    assert template.decode(row.input_ids).endswith(written.removesuffix("\n"))


@settings(relaxed, max_examples=30)
@given(turns=st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=2), thought=st.none() | PIECES)
def test_qwen3_supervises_the_last_answer_whole(turns, thought):
    template = target("qwen3")
    messages = [Message(role, text) for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]
    if thought is not None:
        messages[-1] = Message("assistant", messages[-1].content, reasoning=thought)
    try:
        row = mask_conversation(talk(*messages), template, policy="last_turn", enable_thinking=thought is not None)
    except MaskRefused:
        # The template looks for thoughts in the text, so text that looks like the end of one may be refused, and no other.
        assume("</think>" not in "".join([turns[-1][1], thought or ""]))
        raise
    start, stop = row.spans[-1]
    expected = turns[-1][1] if thought is None else f"<think>\n{thought}\n</think>\n\n{turns[-1][1]}"
    assert template.decode(row.input_ids[start:stop]) == expected + "<|im_end|>"
    assert row.input_ids[:start].tolist() == template.prompt_ids(messages[:-1], enable_thinking=thought is not None)


# -- the view that people check masks with


def test_shown_text_is_the_row_and_only_the_answer_is_coloured():
    template = target("chatml")
    row = mask_conversation(talk("What [bold]now[/bold]?", "Nothing [red]."), template)
    text = row_text(row, template.decode, template.control_ids)
    assert text.plain == template.decode(row.input_ids)
    coloured = "".join(text.plain[s.start : s.end] for s in text.spans if str(s.style).startswith(SUPERVISED_STYLE))
    assert coloured == "Nothing [red].<|im_end|>"
    control = [text.plain[s.start : s.end] for s in text.spans if CONTROL_STYLE in str(s.style)]
    assert control == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_show_prints_as_many_rows_as_asked():
    rows, _ = masked_all([talk("a", "One."), talk("b", "Two.")], target("chatml"))
    console = Console(width=100, file=io.StringIO())
    show_rows(rows, target("chatml").decode, console, 1)
    printed = console.file.getvalue()
    assert "One.<|im_end|>" in printed
    assert "Two." not in printed
    assert rows[0].row_id in printed


def test_a_prompt_is_shown_as_the_target_reads_it_with_what_is_asked_later():
    console = Console(width=100, file=io.StringIO())
    conversation = Conversation((Message("system", "S [x]"), Message("user", "One?"), Message("user", "Two?")), "src", "chat")
    show_prompt(conversation, target("chatml"), console)
    printed = console.file.getvalue()
    assert "2 answers to come" in printed
    assert "<|im_start|>system\nS [x]<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n" in printed
    assert printed.rstrip().endswith("[then] Two?")
