"""Reading prompts: layouts, counted reasons, duplicates, order invariance, the bundled prompts."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from corpus_templates import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.conversation import Conversation, Message, ToolCall
from corpus.errors import CorpusError, RowRejected
from corpus.rows import parse_row
from corpus.sources import BUNDLED, SourceSpec, draw, load_sources, read_source, split_heldout, unique


def write(path, *rows) -> SourceSpec:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return SourceSpec(str(path))


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


# -- layouts


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"conversations": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "system": "S"},
        {"messages": [{"role": "developer", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]},
                      {"role": "assistant", "content": "A"}]},
        {"prompt": [{"role": "system", "content": "S\r\n"}, {"role": "user", "content": "\r\n\r\nQ  \r\n"},
                    {"role": "model", "content": "A"}]},
    ],
)  # fmt: skip
def test_all_message_layouts_give_one_conversation(row):
    conversation = parse_row(row, "here", "chat")
    assert said(conversation) == [("system", "S"), ("user", "Q"), ("assistant", "A")]
    assert conversation.id == Conversation((Message("system", "S"), Message("user", "Q"), Message("assistant", "A")), "x", "y").id
    assert conversation.brings_answers


def test_turns_and_prompt_are_questions():
    turns = parse_row({"turns": ["one", "two"], "domain": "math", "source": "mine"}, "here", "chat")
    assert said(turns) == [("user", "one"), ("user", "two")]
    assert (turns.domain, turns.source) == ("math", "mine")
    assert said(parse_row({"prompt": "one"}, "here", "chat")) == [("user", "one")]
    assert not turns.brings_answers


def test_line_ends_are_normalized_and_indentation_stays():
    conversation = parse_row({"prompt": "  \r\n    if x:\r\n\treturn 1\rend \n\n"}, "here", "code")
    assert conversation.messages[0].content == "    if x:\n\treturn 1\nend"


def test_tool_calls_and_results_in_both_dialects():
    openai = parse_row(
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}],
                },
                {"role": "tool", "content": "", "tool_call_id": "1"},
                {"role": "assistant", "content": "A", "reasoning_content": "R"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "here",
        "chat",
    )
    assert openai.messages[1].tool_calls == (ToolCall("f", '{"a":2,"b":1}', "1"),)
    assert openai.messages[3].reasoning == "R"
    assert openai.tools == ('{"function":{"name":"f"},"type":"function"}',)
    sharegpt = parse_row(
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 2, "b": 1}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "A"},
            ]
        },
        "here",
        "chat",
    )
    assert [m.role for m in sharegpt.messages] == ["user", "assistant", "tool", "assistant"]
    assert sharegpt.messages[1].tool_calls[0].arguments == '{"a":2,"b":1}'
    assert len(sharegpt.rounds()) == 1
    assert len(sharegpt.rounds()[0]) == 3


def test_repairs_are_counted():
    repaired: Counter[str] = Counter()
    row = {
        "messages": [
            {"role": "system", "content": "  "},
            {"role": "user", "content": "one"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": ""},
        ]
    }
    assert said(parse_row(row, "here", "chat", repaired)) == [("user", "one\n\ntwo")]
    assert repaired == {"empty_system_removed": 1, "user_turns_joined": 1, "empty_last_answer_removed": 1}


def user(text="Q"):
    return {"role": "user", "content": text}


def assistant(text="A", **more):
    return {"role": "assistant", "content": text, **more}


UNUSABLE = [
    (["a"], "wrong_type"),
    ("text", "wrong_type"),
    (None, "wrong_type"),
    ({}, "no_known_field"),
    ({"text": "a"}, "no_known_field"),
    ({"prompt": None}, "no_known_field"),
    ({"prompt": 7}, "wrong_type"),
    ({"prompt": " \n\t "}, "empty_turn"),
    ({"turns": []}, "no_turns"),
    ({"turns": "a"}, "wrong_type"),
    ({"turns": ["a", 3]}, "wrong_type"),
    ({"turns": ["a", "  "]}, "empty_turn"),
    ({"turns": ["\ud800"]}, "invalid_utf8"),
    ({"turns": ["a\x00"]}, "invalid_utf8"),
    ({"messages": {}}, "wrong_type"),
    ({"messages": []}, "no_turns"),
    ({"messages": ["a"]}, "wrong_type"),
    ({"messages": [{"content": "a"}]}, "unknown_role"),
    ({"messages": [{"role": "alien", "content": "a"}]}, "unknown_role"),
    ({"messages": [{"role": "user", "content": 5}]}, "wrong_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "not_text"),
    ({"messages": [{"role": "system", "content": "S"}]}, "no_user_turn"),
    ({"messages": [{"role": "system", "content": ""}]}, "no_user_turn"),
    ({"messages": [assistant(), user()]}, "assistant_first"),
    ({"messages": [user(), assistant(), assistant("B")]}, "role_order"),
    ({"messages": [user(), assistant(""), user()]}, "empty_turn"),
    ({"messages": [user(), {"role": "system", "content": "S"}]}, "system_not_first"),
    ({"messages": [user(), {"role": "tool", "content": "4"}]}, "tool_without_call"),
    ({"messages": [user(), assistant(tool_calls=[{"function": {"name": "f"}}]), user()]}, "role_order"),
    ({"messages": [user(), assistant(tool_calls=[{"function": {}}])]}, "bad_tool_call"),
    ({"messages": [user(), assistant(tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]}, "bad_tool_call"),
    ({"messages": [user(), assistant(tool_calls="f")]}, "bad_tool_call"),
    ({"messages": [user()], "tools": 3}, "bad_tools"),
    ({"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": "not JSON"}]}, "bad_tool_call"),
]


@pytest.mark.parametrize(("row", "reason"), UNUSABLE)
def test_unusable_rows_have_a_reason(row, reason):
    with pytest.raises(RowRejected) as rejected:
        parse_row(row, "here", "chat")
    assert rejected.value.reason == reason


@settings(relaxed, max_examples=80)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["user", "assistant", "tool", "system", "{}"]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["messages", "turns", "prompt", "role", "content", "tool_calls", "function", "name"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_conversation_or_a_reason(value):
    try:
        conversation = parse_row(value, "here", "chat")
    except RowRejected:
        return
    assert any(m.role == "user" for m in conversation.messages)


TALKS = st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), min_size=1, max_size=3)


@relaxed
@given(pairs=TALKS, system=st.text(max_size=4), as_turns=st.booleans())
def test_written_rows_are_read_back_the_same(pairs, system, as_turns):
    messages = [{"role": "system", "content": system}, *(m for q, a in pairs for m in (user(q), assistant(a, reasoning_content="R")))]
    try:
        conversation = parse_row({"turns": [q for q, _ in pairs]} if as_turns else {"messages": messages}, "here", "chat")
    except RowRejected:
        return
    again = parse_row(json.loads(json.dumps(conversation.to_row())), "x", "y")
    assert again == conversation
    assert again.to_row() == conversation.to_row()


def test_written_tool_calls_are_read_back_the_same():
    call = assistant("", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {"b": [1.5, None], "a": "é"}}}])
    messages = [user(), call, {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"}, assistant()]
    conversation = parse_row({"messages": messages, "tools": [{"name": "f"}]}, "here", "chat")
    assert parse_row(json.loads(json.dumps(conversation.to_row())), "x", "y") == conversation


# -- rounds


def test_rounds_are_what_the_target_reads_before_each_answer():
    row = {"messages": [{"role": "system", "content": "S"}, user("1"), assistant("A"), user("2")]}
    conversation = parse_row(row, "here", "chat")
    assert [[m.content for m in r] for r in conversation.rounds()] == [["S", "1"], ["2"]]
    assert [[m.content for m in r] for r in parse_row({"turns": ["1", "2"]}, "h", "chat").rounds()] == [["1"], ["2"]]


# -- files


def test_every_row_is_accounted_for(tmp_path):
    spec = write(
        tmp_path / "mixed.jsonl",
        b'\xef\xbb\xbf{"prompt": "one"}\r',
        {"prompt": "two"},
        b"",
        b"   \r",
        b'{"prompt": "\xff"}',
        b'{"prompt": ',
        {"prompt": "  one\r\n"},
        {"prompt": "x" * 50},
        {"turns": []},
    )
    rows, report = read_source(SourceSpec(spec.name, max_chars=40))
    assert {r.messages[0].content.strip() for r in rows} == {"one", "two"}
    assert report.read == 7
    assert report.dropped == {"invalid_utf8": 1, "invalid_json": 1, "duplicate": 1, "too_long": 1, "no_turns": 1}
    assert report.read == report.kept + sum(report.dropped.values())
    assert report.examples["invalid_utf8"] == "line 5: byte 12 is not UTF-8"
    assert report.to_json()["source"] == "mixed"


def test_json_array_files_are_read(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "Q"}]}, 3]))
    rows, report = read_source(SourceSpec(str(path)))
    assert len(rows) == 1
    assert report.examples == {"wrong_type": "row 2: a row is an object, this one is a number"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "holds no rows"),
        ("blank.jsonl", b"\n \r\n", "holds no rows"),
        ("empty.json", b"", "holds no rows"),
        ("broken.json", b"[1,", "not a JSON document"),
        ("object.json", b"{}", "no array of rows"),
        ("bad.jsonl", b'\n{"turns": [""]}\n{"a": 1}', "none of the 2 rows .* line 2: empty_turn: turn 1 is empty"),
    ],
)
def test_a_file_without_usable_rows_is_an_error(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as error:
        read_source(SourceSpec(str(path)))
    assert str(path) in str(error.value)


def test_missing_files_folders_and_wrong_names(tmp_path):
    with pytest.raises(CorpusError, match="no prompt file"):
        read_source(SourceSpec(str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(CorpusError, match="is a folder"):
        read_source(SourceSpec(str(tmp_path)))
    with pytest.raises(CorpusError, match="bundled:train"):
        read_source(SourceSpec("bundled:dev"))
    with pytest.raises(CorpusError, match="no prompt source"):
        load_sources([])
    with pytest.raises(CorpusError, match="share"):
        SourceSpec("a.jsonl", share=0)
    with pytest.raises(CorpusError, match="limit"):
        SourceSpec("a.jsonl", limit=0)


def test_duplicates_across_sources_count_for_the_later_one(tmp_path):
    first = write(tmp_path / "a.jsonl", {"prompt": "one"}, {"prompt": "two"})
    second = write(tmp_path / "b.jsonl", {"prompt": "two "}, {"prompt": "three"})
    rows, reports = load_sources([first, second])
    assert [r.messages[0].content for r in rows] == ["one", "two", "three"]
    assert [r.source for r in rows] == ["a", "a", "b"]
    assert (reports[1].kept, dict(reports[1].dropped)) == (1, {"duplicate": 1})


def test_share_and_limit_are_reported_and_nested(tmp_path):
    spec = write(tmp_path / "a.jsonl", *({"prompt": f"question {i}"} for i in range(200)))
    rows, _ = read_source(spec)
    half, quarter = draw(rows, 0.5, None), draw(rows, 0.25, None)
    assert set(quarter) < set(half) < set(rows)
    assert 70 < len(half) < 130
    assert set(draw(rows, 1.0, 10)) < set(draw(rows, 1.0, 20))
    _, (report,) = load_sources([SourceSpec(spec.name, limit=20)])
    assert (report.read, report.kept, report.not_drawn) == (200, 20, 180)


# -- order invariance

ROWS = st.lists(
    st.lists(st.sampled_from(["one", "one ", "o ne", "two", "two\n\ntwo", "two two", "  three"]), min_size=1, max_size=2),
    min_size=1,
    max_size=12,
)


@settings(relaxed, max_examples=60)
@given(rows=ROWS, data=st.data())
def test_ids_duplicates_draw_and_split_do_not_depend_on_order(rows, data):
    shuffled = data.draw(st.permutations(rows))

    def run(turn_lists):
        kept = unique([parse_row({"turns": turns}, "here", "chat") for turns in turn_lists])
        train, heldout = split_heldout(draw(kept, 0.8, 5), 0.4)
        return {c.id for c in kept}, {c.id for c in train}, {c.id for c in heldout}

    assert run(rows) == run(shuffled)


@settings(relaxed, max_examples=40)
@given(rows=ROWS, more=ROWS)
def test_a_question_never_changes_sides_when_rows_are_added(rows, more):
    def sides(turn_lists):
        train, heldout = split_heldout([parse_row({"turns": t}, "here", "chat") for t in turn_lists], 0.5)
        return {c.id for c in train}, {c.id for c in heldout}

    (train, heldout), (more_train, more_heldout) = sides(rows), sides(rows + more)
    assert train <= more_train
    assert heldout <= more_heldout


def test_same_question_with_other_continuation_stays_on_one_side():
    for i in range(50):
        pair = [parse_row({"turns": [f"Question {i}", *tail]}, "h", "chat") for tail in ([], ["and then?"])]
        train, _ = split_heldout(pair, 0.5)
        assert len(train) in (0, 2)
    train, heldout = split_heldout([parse_row({"prompt": f"q {i}"}, "h", "chat") for i in range(2000)], 0.1)
    assert 140 < len(heldout) < 260
    with pytest.raises(CorpusError, match="held-out share"):
        split_heldout(train, 1.0)


def test_id_sees_content_only():
    one = parse_row({"prompt": "a  b"}, "x", "math")
    assert one.id == parse_row({"turns": ["a  b\r\n"]}, "y", "chat").id
    other = parse_row({"prompt": "a b"}, "x", "math")
    assert one.id != other.id
    assert one.near_key == other.near_key
    assert one.id != parse_row({"messages": [user("a  b")], "tools": [{"name": "f"}]}, "x", "math").id


# -- what ships with the project


def test_bundled_prompts_are_enough_balanced_and_apart():
    train, heldout = (load_sources([SourceSpec(name)]) for name in BUNDLED)
    for (rows, (report,)), least in ((train, 360), (heldout, 48)):
        assert report.kept == report.read >= least
        assert not report.dropped
        assert not report.repaired
        share = Counter(row.domain for row in rows)
        assert set(share) == {"math", "code", "chat"}
        assert all(abs(count - len(rows) / 3) < 0.05 * len(rows) for count in share.values())
    assert not {c.split_key for c in train[0]} & {c.split_key for c in heldout[0]}

    def words(conversation):
        return " ".join(re.findall(r"\w+", " ".join(m.content for m in conversation.messages).lower()))

    def shingles(text):
        parts = text.split()
        return {tuple(parts[i : i + 5]) for i in range(len(parts) - 4)}

    # Wording is shared (how to ask, how to end), content is not: no held-out prompt takes most of its phrases from training prompts.
    known = set().union(*(shingles(words(c)) for c in train[0]))
    for conversation in heldout[0]:
        own = shingles(words(conversation))
        assert len(own & known) <= 0.6 * len(own) or len(own) < 3, conversation.messages[0].content
