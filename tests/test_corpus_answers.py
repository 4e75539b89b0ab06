"""Answered rows: spans, what may be trained on, cutting, loops, bytes in and out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from corpus_templates import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.answers import AnsweredRow, decode_answers, encode_answers, training_rows, unusable, usable
from corpus.card import card_markdown, summarize
from corpus.errors import CorpusError
from corpus.loops import LoopRule, is_looping
from corpus.masked import MaskedRow, cut

STOP = 2
STOPS = (STOP, 9)


def row(answer, finish="stop", prompt=(5, 6, 7), conversation="c", turn=0, **more) -> AnsweredRow:
    return AnsweredRow(conversation, turn, "src", "math", prompt, answer, finish, **more)


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30)


# -- spans


@relaxed
@given(prompt=IDS, answer=IDS)
def test_mask_is_exactly_the_generated_tokens(prompt, answer):
    masked = row(answer, prompt=prompt).masked()
    assert masked.loss_mask().tolist() == [False] * len(prompt) + [True] * len(answer)
    assert masked.input_ids[masked.loss_mask()].tolist() == answer
    assert masked.input_ids[~masked.loss_mask()].tolist() == prompt
    assert masked.input_ids.dtype == np.int32


@pytest.mark.parametrize("spans", [(), ((0, 5),), ((0, 2),), ((3, 3),), ((4, 6),), ((3, 4), (2, 5)), ((1, 3), (3, 4)), ((2, 1),)])
def test_impossible_masks_are_errors(spans):
    with pytest.raises(CorpusError):
        MaskedRow("r", "c", "s", "d", np.arange(5), spans)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": [1.5]},
        {"prompt": [[1]]},
        {"answer": [-1]},
        {"answer": [2**31]},
        {"answer": ["a"]},
        {"finish": "eos"},
        {"turn": -1},
        {"conversation": ""},
    ],
)
def test_rows_of_wrong_values_are_errors(values):
    with pytest.raises(CorpusError):
        row(**{"answer": [1], **values})


# -- what may be trained on


@pytest.mark.parametrize(
    ("answered", "reason"),
    [
        (row([4, 3, STOP]), None),
        (row([4, 3, 9]), None),
        (row([4, 3]), "no_stop_token"),
        (row([4, 3], "length"), "truncated"),
        (row([4, 3, STOP], "length"), "truncated"),
        (row([]), "empty"),
        (row([], "length"), "empty"),
        (row([STOP]), "empty"),
        (row([], "failed", error="engine died"), "failed"),
        (row([4, STOP], prompt=[]), "failed"),
        (row([4, 5, 6] * 30 + [STOP]), "looping"),
        (row([4, 5, 6] * 30, "length"), "truncated"),
    ],
)
def test_each_unusable_row_has_one_reason(answered, reason):
    assert unusable(answered, STOPS) == reason
    assert usable(answered, STOPS) == (reason is None)


def test_truncated_rows_can_be_kept_unless_they_loop():
    assert unusable(row([4, 3], "length"), STOPS, keep_truncated=True) is None
    assert unusable(row([4, 5, 6] * 30, "length"), STOPS, keep_truncated=True) == "looping"


def test_summary_counts_every_row_once_and_truncation_in_full():
    rows = [
        row([4, 3, STOP], conversation="a"),
        row([4, 3, 8, STOP], conversation="b"),
        row([4, 3], "length", conversation="c"),
        row([4, 5, 6] * 30, "length", conversation="d"),
        row([4, 5, 6] * 30 + [STOP], conversation="e"),
        row([], "failed", conversation="f"),
        row([STOP], conversation="g"),
    ]
    summary = summarize(rows, STOPS).to_json()
    assert summary["finish_reasons"] == {"stop": 4, "length": 2, "failed": 1}
    assert summary["unusable"] == {"failed": 1, "empty": 1, "truncated": 2, "looping": 1, "no_stop_token": 0}
    assert summary["usable"] + sum(summary["unusable"].values()) == summary["rows"] == len(rows)
    assert summary["looping"] == 2
    assert summary["supervised_tokens"] == 7
    assert summary["supervised_share"] == 7 / 13
    assert summary["by_source"]["src"]["usable"] == 2
    assert summarize([], STOPS).to_json()["supervised_share"] == 0


def test_card_gives_every_figure():
    """Each group's figures against a count by hand, in the JSON and in the tables for people."""
    rows = [
        AnsweredRow("a", 0, "gsm", "math", [5] * 10, [*range(10, 29), STOP], "stop"),
        AnsweredRow("b", 0, "gsm", "math", [5] * 10, [*range(10, 29), STOP], "stop"),
        AnsweredRow("c", 0, "mbpp", "code", [6] * 4, [3, 4], "length"),
        AnsweredRow("d", 0, "mbpp", "code", [7] * 300, [], "failed", "the prompt's 300 tokens leave no room"),
        AnsweredRow("e", 0, "mbpp", "code", [7] * 301, [], "failed", "the prompt's 301 tokens leave no room"),
    ]
    figures = summarize(rows, STOPS).to_json()
    math = {"rows": 2, "usable": 2, "prompt_tokens": 20, "answer_tokens": 40, "usable_prompt_tokens": 20, "supervised_tokens": 40}
    code = {"rows": 3, "usable": 0, "prompt_tokens": 605, "answer_tokens": 2, "usable_prompt_tokens": 0, "supervised_tokens": 0}
    assert figures["by_domain"] == {"math": {**math, "supervised_share": 2 / 3}, "code": {**code, "supervised_share": 0}}
    assert figures["by_source"] == {"gsm": figures["by_domain"]["math"], "mbpp": figures["by_domain"]["code"]}
    assert figures["answer_lengths"] == {"0": 2, "1": 0, "2-3": 1, "4-7": 0, "8-15": 0, "16-31": 2}
    assert (figures["same_prompts"], figures["same_answers"]) == (1, 1)
    assert figures["failures"] == {"the prompt's N tokens leave no room": 2}
    page = card_markdown({"name": "Answers of T to C", "rows": figures, "sampling": {"temperature": 0.7, "note": "a|b"}})
    for line in (
        "# Answers of T to C",
        "| usable | 2 | 40.0% |",
        "| truncated | 1 | 20.0% |",
        "| math | 2 | 2 | 20 | 40 | 40 | 66.7% |",
        "| **all** | 5 | 2 | 625 | 42 | 40 | 66.7% |",
        "| 16-31 | 2 | 40.0% |",
        "| the prompt's N tokens leave no room | 2 |",
        "| temperature | 0.7 |",
        "| note | a\\|b |",
    ):
        assert line in page.splitlines()


# -- loops


def naive_is_looping(ids, rule):
    for period in range(1, rule.max_period + 1):
        length = max(rule.repeats * period, rule.min_tokens)
        for start in range(len(ids) - length + 1):
            part = ids[start : start + length]
            agree = sum(a == b for a, b in zip(part, part[period:], strict=False))
            if agree >= rule.agreement * (length - period):
                return True
    return False


@settings(relaxed, max_examples=150)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(2, 4), st.integers(4, 16), st.sampled_from([0.7, 0.9, 1.0]))
def test_loops_agree_with_the_definition(ids, repeats, min_tokens, agreement):
    rule = LoopRule(max_period=6, repeats=repeats, min_tokens=min_tokens, agreement=agreement)
    assert is_looping(ids, rule) == naive_is_looping(ids, rule)


def test_counting_loops_are_found_and_real_text_is_not():
    rng = np.random.default_rng(0)
    counting = [t for n in range(8) for t in (100 + n, *range(20))]
    assert is_looping(rng.integers(0, 1000, 100).tolist() + counting, LoopRule())
    assert not is_looping(rng.integers(0, 1000, 500), LoopRule())
    table = [t for n in range(12) for t in (100 + n, 3, 7, 200 + n, 5, 300 + n)]  # half of each line is new
    assert not is_looping(table, LoopRule())
    assert not is_looping([1] * 40, LoopRule())  # a ruled line
    assert is_looping([1] * 60, LoopRule())


# -- turns of one conversation


def test_turns_join_where_the_prompt_continues_the_ids():
    first = row([4, STOP], prompt=[5, 6])
    second = row([8, STOP], prompt=[5, 6, 4, STOP, 1, 7], turn=1)
    (joined,) = training_rows([second, first])
    assert joined.input_ids.tolist() == [5, 6, 4, STOP, 1, 7, 8, STOP]
    assert joined.spans == ((2, 4), (6, 8))
    assert joined.row_id == "c.1"


def test_turns_stay_apart_where_it_does_not():
    first = row([4, STOP], prompt=[5, 6])
    changed = row([8, STOP], prompt=[5, 6, 3, STOP, 1, 7], turn=1)
    assert [r.spans for r in training_rows([first, changed])] == [((2, 4),), ((6, 8),)]
    gap = row([8, STOP], prompt=[5, 6, 4, STOP, 1, 7], turn=2)
    assert len(training_rows([first, gap])) == 2


def test_unusable_turns_are_not_supervised_in_later_ones():
    first = row([4, 3], "length", prompt=[5, 6])
    second = row([8, STOP], prompt=[5, 6, 4, 3, 1, 7], turn=1)
    (only,) = training_rows(turn for turn in [first, second] if usable(turn, STOPS))
    assert only.spans == ((6, 8),)


@relaxed
@given(st.permutations([(c, t) for c in "abc" for t in (0, 1)]))
def test_training_rows_do_not_depend_on_order(order):
    rows = [row([4, STOP], conversation=c, turn=t) for c, t in order]
    assert training_rows(rows) == training_rows(rows[::-1])
    with pytest.raises(CorpusError, match="twice"):
        training_rows([*rows, rows[0]])


# -- cutting


def masked(length, *spans):
    return MaskedRow("r", "c", "s", "d", np.arange(length), spans)


def test_cut_keeps_rows_that_fit():
    whole = masked(10, (4, 10))
    assert cut(whole, 10) is whole
    assert cut(masked(10, (4, 5)), 10) is None


@pytest.mark.parametrize(
    ("spans", "limit", "length", "left"),
    [
        (((4, 10),), 7, 7, ((4, 7),)),
        (((2, 4), (6, 10)), 8, 8, ((2, 4), (6, 8))),
        (((2, 4), (6, 10)), 6, 4, ((2, 4),)),
        (((2, 4), (6, 10)), 5, 4, ((2, 4),)),
    ],
)
def test_cut_ends_with_a_supervised_token(spans, limit, length, left):
    short = cut(masked(10, *spans), limit)
    assert short.spans == left
    assert short.input_ids.tolist() == list(range(length))


def test_cut_drops_rows_without_an_anchor_left():
    assert cut(masked(10, (4, 10)), 5) is None
    assert cut(masked(10, (4, 10)), 3) is None
    with pytest.raises(CorpusError, match="max_length"):
        cut(masked(10, (4, 10)), 1)


@relaxed
@given(prompt=st.integers(1, 20), answer=st.integers(1, 20), limit=st.integers(2, 45))
def test_cut_is_a_prefix_whose_mask_is_a_prefix(prompt, answer, limit):
    whole = masked(prompt + answer, (prompt, prompt + answer))
    short = cut(whole, limit)
    if short is None:
        assert min(limit, prompt + answer) - prompt < 2
    else:
        size = len(short.input_ids)
        assert size <= limit
        assert short.loss_mask()[-1]
        assert short.loss_mask().tolist() == whole.loss_mask()[:size].tolist()


# -- bytes

ANSWERS = st.lists(
    st.builds(
        AnsweredRow,
        st.text("0123456789abcdef", min_size=1, max_size=4),
        st.integers(0, 3),
        st.text(max_size=3),
        st.sampled_from(["math", "chat"]),
        IDS,
        st.lists(st.integers(0, 60000), max_size=10),
        st.sampled_from(["stop", "length", "failed"]),
        st.sampled_from(["", "engine died: 'x'\n"]),
    ),
    max_size=6,
    unique_by=lambda r: r.row_id,
)


@settings(relaxed, max_examples=40)
@given(rows=ANSWERS)
def test_bytes_return_the_same_rows(rows):
    data = encode_answers(rows, {"target": "t", "temperature": 0.7})
    assert decode_answers(data, "here") == (rows, {"target": "t", "temperature": 0.7})
    assert encode_answers(rows, {"temperature": 0.7, "target": "t"}) == data


def test_every_truncation_is_noticed():
    data = encode_answers([row([4, STOP])], {})
    for stop in range(0, len(data), 7):
        with pytest.raises(CorpusError, match=r"answers/0\.arrow"):
            decode_answers(data[:stop], "answers/0.arrow")


def test_a_changed_token_is_noticed():
    data = encode_answers([row([77777, STOP])], {})
    at = data.index((77777).to_bytes(4, "little"))
    with pytest.raises(CorpusError, match=r"row 0 \(c\.0\) of here is damaged"):
        decode_answers(data[:at] + b"\x01" + data[at + 1 :], "here")


def test_other_arrow_files_and_doubled_rows_are_refused():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("a", pa.int32())])):
        pass
    with pytest.raises(CorpusError, match="schema version"):
        decode_answers(sink.getvalue().to_pybytes(), "here")
    with pytest.raises(CorpusError, match="twice"):
        encode_answers([row([1]), row([2])], {})
