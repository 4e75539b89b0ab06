"""Reading prompts: layouts, counted reasons, hub data sets, the bundled prompts."""

from __future__ import annotations

import json
import re
from collections import Counter

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_templates import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.conversation import Conversation, Message, ToolCall
from corpus.errors import CorpusError, RowRejected
from corpus.hub import HubUnreachable
from corpus.rows import parse_row
from corpus.selection import drop_duplicates
from corpus.sources import BUNDLED, SourceSpec, read_source


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
    ({"messages": [{"role": "system", "content": "S"}, assistant()]}, "assistant_first"),
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
        b"[" * 100_000,
        {"prompt": "x" * 1_000_000},
        {"turns": []},
    )
    watched: list[int] = []
    source = read_source(spec, watch=watched.append)
    assert [r.messages[0].content[:3].strip() for r in source.rows] == ["one", "two", "xxx"]
    assert source.read == watched[-1] == 7
    assert source.dropped == {"invalid_utf8": 1, "invalid_json": 2, "no_turns": 1}
    assert source.read == source.kept + sum(source.dropped.values())
    assert source.examples["invalid_utf8"] == "line 5: byte 12 is not UTF-8"
    assert source.to_json()["source"] == "mixed"


def test_the_first_rows_alone_are_read_on_request(tmp_path):
    spec = write(tmp_path / "a.jsonl", *({"prompt": f"question {i}"} for i in range(9)), b"broken")
    source = read_source(SourceSpec(spec.name, first=4))
    assert (source.read, [r.messages[0].content[-1] for r in source.rows]) == (4, list("0123"))


def test_a_judge_sifts_rows_under_its_reason(tmp_path):
    source = read_source(write(tmp_path / "a.jsonl", *({"prompt": f"question {i}"} for i in range(6))))

    def judge(row):
        if int(row.messages[0].content[-1]) % 2:
            raise RowRejected("odd", "an odd one")

    source.sift(judge)
    assert source.kept == 3
    assert source.dropped == {"odd": 3}
    assert source.read == source.kept + sum(source.dropped.values())


def test_answers_are_dropped_on_request_and_what_is_asked_is_read_back_the_same(tmp_path):
    talks = [
        {"messages": [{"role": "system", "content": "S"}, user("1"), assistant("A"), user("2"), assistant("B")]},
        {"messages": [user("1"), assistant("A"), user("2")]},
        {"messages": [user("1"), assistant(tool_calls=[{"function": {"name": "f"}}]), {"role": "tool", "content": "4"}, assistant("B")]},
    ]
    asked = read_source(write(tmp_path / "a.jsonl", *talks), keep_answers=False).rows
    assert said(asked[0]) == [("system", "S"), ("user", "1"), ("user", "2")]
    assert said(asked[1]) == [("user", "1"), ("user", "2")]
    assert [m.role for m in asked[2].messages] == ["user", "assistant", "tool"]
    for row, whole in zip(asked, read_source(write(tmp_path / "a.jsonl", *talks)).rows, strict=True):
        assert row.rounds() == whole.rounds()
        assert parse_row(json.loads(json.dumps(row.to_row())), "x", "y") == row


def test_json_array_files_are_read(tmp_path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "Q"}]}, 3]))
    source = read_source(SourceSpec(str(path)))
    assert source.kept == 1
    assert source.examples == {"wrong_type": "row 2: a row is an object, this one is a number"}


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
    with pytest.raises(CorpusError, match=f"is a folder.*hf:{tmp_path}"):
        read_source(SourceSpec(str(tmp_path)))
    with pytest.raises(CorpusError, match="bundled:train"):
        read_source(SourceSpec("bundled:dev"))
    with pytest.raises(CorpusError, match="weight"):
        SourceSpec("a.jsonl", weight=0)
    with pytest.raises(CorpusError, match="first"):
        SourceSpec("a.jsonl", first=0)
    with pytest.raises(CorpusError, match="only hub data sets"):
        SourceSpec("a.jsonl", split="test")


# -- data sets of the hub, in the layout that they have there


def table(rows):
    return pa.Table.from_pylist(rows)


def perfectblend(count):
    """Rows as open-perfectblend has them."""
    turns = [[{"from": "human", "value": f"Question {i}?"}, {"from": "gpt", "value": "Answer."}] for i in range(count)]
    return [{"conversations": turn, "source": ("meta/math", "ultra/chat")[i % 2]} for i, turn in enumerate(turns)]


def test_a_data_set_is_streamed_shard_by_shard(tmp_path):
    (tmp_path / "data").mkdir()
    for shard, rows in enumerate((perfectblend(600), perfectblend(900)[600:])):
        pq.write_table(table(rows), tmp_path / "data" / f"train-0000{shard}-of-00002.parquet")
    source = read_source(SourceSpec(f"hf:{tmp_path}", domain="mixed"))
    assert [r.messages[0].content for r in source.rows] == [f"Question {i}?" for i in range(900)]
    assert [m.role for m in source.rows[0].messages] == ["user", "assistant"]
    assert {(r.source, r.domain) for r in source.rows} == {("meta/math", "mixed"), ("ultra/chat", "mixed")}
    assert source.label == tmp_path.name
    assert read_source(SourceSpec(f"hf:{tmp_path}", first=650)).read == 650


def test_splits_subsets_and_json_files_are_found(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": split}) + "\n")
    assert [r.messages[0].content for r in read_source(SourceSpec(f"hf:{tmp_path}", split="test")).rows] == ["test"]
    with pytest.raises(CorpusError, match=r"split dev.*Available splits"):
        read_source(SourceSpec(f"hf:{tmp_path}", split="dev"))
    with pytest.raises(CorpusError, match="'socratic' not found"):
        read_source(SourceSpec(f"hf:{tmp_path}", subset="socratic"))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: test.jsonl\n- config_name: other\n  data_files: train.jsonl\n---\n"
    )
    assert [r.messages[0].content for r in read_source(SourceSpec(f"hf:{tmp_path}", subset="main")).rows] == ["test"]


def test_fields_that_a_table_leaves_null_count_as_absent(tmp_path):
    messages = [{"role": "user", "content": "Q", "from": None, "value": None, "tool_calls": None},
                {"role": None, "content": None, "from": "gpt", "value": "A", "tool_calls": None}]  # fmt: skip
    pq.write_table(table([{"messages": messages, "conversations": None, "tools": None}]), tmp_path / "train.parquet")
    assert said(read_source(SourceSpec(f"hf:{tmp_path}")).rows[0]) == [("user", "Q"), ("assistant", "A")]


def test_text_of_a_table_that_is_not_utf8_drops_its_row_alone(tmp_path):
    texts = pa.array([b"one", b"\xff\xfe", b"three"]).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "train.parquet")
    source = read_source(SourceSpec(f"hf:{tmp_path}"))
    assert [r.messages[0].content for r in source.rows] == ["one", "three"]
    assert source.dropped == {"invalid_utf8": 1}
    assert source.examples["invalid_utf8"].startswith("row 2: ")


def test_data_sets_that_cannot_be_read_are_one_line(tmp_path):
    with pytest.raises(CorpusError, match=r"cannot read the data set .*any data files"):
        read_source(SourceSpec(f"hf:{tmp_path}"))
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    with pytest.raises(CorpusError, match="cannot read the data set") as error:
        read_source(SourceSpec(f"hf:{tmp_path}"))
    assert "\n" not in str(error.value)


def test_a_hub_out_of_reach_is_said_so(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match=r"HF_HUB_OFFLINE.*hf:/path/to/folder"):
        read_source(SourceSpec("hf:mlabonne/open-perfectblend"))


# -- ids


def test_id_sees_content_only():
    one = parse_row({"prompt": "a  b"}, "x", "math")
    assert one.id == parse_row({"turns": ["a  b\r\n"]}, "y", "chat").id
    other = parse_row({"prompt": "a b"}, "x", "math")
    assert one.id != other.id
    assert one.near_key == other.near_key
    assert one.id != parse_row({"messages": [user("a  b")], "tools": [{"name": "f"}]}, "x", "math").id


# -- what ships with the project


def test_bundled_prompts_are_enough_balanced_and_apart():
    train, heldout = (read_source(SourceSpec(name)) for name in BUNDLED)
    drop_duplicates([train, heldout])
    for source, least in ((train, 360), (heldout, 48)):
        assert source.kept == source.read >= least
        assert not source.repaired
        share = Counter(row.domain for row in source.rows)
        assert set(share) == {"math", "code", "chat"}
        assert all(abs(count - source.kept / 3) < 0.05 * source.kept for count in share.values())
    assert not {c.split_key for c in train.rows} & {c.split_key for c in heldout.rows}

    def words(conversation):
        return " ".join(re.findall(r"\w+", " ".join(m.content for m in conversation.messages).lower()))

    def shingles(text):
        parts = text.split()
        return {tuple(parts[i : i + 5]) for i in range(len(parts) - 4)}

    # Wording is shared (how to ask, how to end), content is not: no held-out prompt takes most of its phrases from training prompts.
    known = set().union(*(shingles(words(c)) for c in train.rows))
    for conversation in heldout.rows:
        own = shingles(words(conversation))
        assert len(own & known) <= 0.6 * len(own) or len(own) < 3, conversation.messages[0].content
