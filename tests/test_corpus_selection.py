"""Which rows make up a corpus: duplicates, mixtures and the held-out split, whatever the order."""

from __future__ import annotations

import copy

import pytest
from corpus_templates import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.errors import CorpusError
from corpus.rows import parse_row
from corpus.selection import drop_duplicates, mix, split_heldout
from corpus.sources import Source, SourceSpec


def source(name: str, texts, weight=None, **row) -> Source:
    rows = [parse_row({"turns": [text] if isinstance(text, str) else text, **row}, name, "chat") for text in texts]
    return Source(SourceSpec(name, weight=weight), name, rows, read=len(rows))


def asked(one: Source) -> list[str]:
    return [row.messages[0].content for row in one.rows]


def accounted(one: Source) -> bool:
    return one.read == one.kept + sum(one.dropped.values()) + one.not_drawn


# -- duplicates


def test_rows_that_differ_in_whitespace_are_one():
    one = source("a", ["one  two", "one two", "one\n\ntwo ", "three"])
    drop_duplicates([one])
    assert sorted(" ".join(text.split()) for text in asked(one)) == ["one two", "three"]
    assert one.dropped == {"duplicate": 2}
    assert accounted(one)


def test_a_row_of_several_sources_counts_for_the_first_by_name_however_they_are_listed():
    for order in ((0, 1), (1, 0)):
        both = [source("a", ["one", "two"]), source("b", ["two ", "three"])]
        drop_duplicates([both[i] for i in order])
        assert [asked(one) for one in both] == [["one", "two"], ["three"]]
        assert both[1].dropped == {"duplicate": 1}


def test_another_case_or_another_answer_is_no_duplicate():
    one = source("a", ["One", "one"])
    drop_duplicates([one])
    assert one.kept == 2
    rows = [parse_row({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": a}]}, "a", "chat") for a in "xy"]
    answered = Source(SourceSpec("a"), "a", rows, read=2)
    drop_duplicates([answered])
    assert answered.kept == 2
    as_asked = Source(SourceSpec("a"), "a", [row.questions() for row in rows], read=2)
    drop_duplicates([as_asked])
    assert as_asked.kept == 1, "the target would be asked the same twice"


# -- mixtures


def questions(count, kind):
    return [f"{kind} question {i}" for i in range(count)]


def test_a_mixture_has_the_weights_and_is_as_large_as_its_sources_allow():
    parts = [source("a", questions(100, "a"), weight=3), source("b", questions(100, "b"), weight=1), source("c", questions(12, "c"), 0.5)]
    mix(parts)
    assert [part.kept for part in parts] == [72, 24, 12]
    assert all(map(accounted, parts))
    mix(unweighted := [source("a", questions(5, "a")), source("b", questions(50, "b"))])
    assert [part.kept for part in unweighted] == [5, 50]


def test_what_cannot_be_mixed_is_an_error():
    with pytest.raises(CorpusError, match="b has none"):
        mix([source("a", ["x"], weight=1), source("b", ["y"])])
    with pytest.raises(CorpusError, match="b has no row left"):
        mix([source("a", ["x"], weight=1), source("b", [], weight=1)])


@relaxed
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    data=st.data(),
)
def test_a_mixture_depends_on_neither_order_and_no_larger_one_exists(sizes, weights, data):
    parts = [source(f"s{i}", questions(size, f"s{i}"), weight) for i, (size, weight) in enumerate(zip(sizes, weights, strict=False))]
    shuffled = data.draw(st.permutations(copy.deepcopy(parts)))
    for part in shuffled:
        part.rows = data.draw(st.permutations(part.rows))
    mix(parts)
    mix(shuffled)
    assert {part.label: set(asked(part)) for part in parts} == {part.label: set(asked(part)) for part in shuffled}
    total = sum(weights[: len(sizes)])
    largest = min(size * total / weight for size, weight in zip(sizes, weights, strict=False))
    for part, weight in zip(parts, weights, strict=False):
        assert abs(part.kept - largest * weight / total) < 1 + 1e-6
    assert any(part.kept == part.read for part in parts)


def test_a_source_that_grows_keeps_what_it_gave():
    def drawn(count):
        parts = [source("a", questions(count, "a"), weight=1), source("b", questions(count // 2, "b"), weight=1)]
        mix(parts)
        return set(asked(parts[1]))

    assert drawn(20) < drawn(40)


# -- the held-out split

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
        parts = [source("a", turn_lists, weight=1), source("b", ["four", "five"], weight=1)]
        drop_duplicates(parts)
        mix(parts)
        train, heldout = split_heldout([row for part in parts for row in part.rows], 0.4)
        return {c.id for c in train}, {c.id for c in heldout}

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
