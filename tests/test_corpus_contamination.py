"""Training prompts that repeat a benchmark question, told from those that share its wording alone."""

from __future__ import annotations

import pytest
from corpus_templates import relaxed
from hypothesis import given
from hypothesis import strategies as st

from corpus.contamination import REASON, BenchmarkIndex
from corpus.errors import RowRejected
from corpus.rows import parse_row

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FERRY = "A ferry carries 12 cars on each of its 9 daily trips, and every third trip is half empty. How many cars cross the lake in a week?"
BAKER = "Lena bakes 30 rolls before sunrise and sells them for 40 cents each; the unsold ones feed her hens. What does she earn on Sunday?"
TILES = (
    "The floor of a hexagonal pavilion is tiled with triangles of side 5. How many triangles does she need if each wall is 3 metres long?"
)
MBPP = [f"Write a function to find the {what}." for what in ("volume of a sphere", "area of a ring", "median of a list", "last vowel")]


def row(*turns: str, source: str = "train"):
    return parse_row({"turns": list(turns)}, source, "chat")


def index(*questions: str, templates=()) -> BenchmarkIndex:
    return BenchmarkIndex([row(question, source="bench") for question in questions], templates)


MATH = index(*(question + BOXED for question in (FERRY, BAKER, TILES)))


@pytest.mark.parametrize(
    "text",
    [
        FERRY + BOXED,
        FERRY,
        FERRY.upper().replace(",", " ;\n"),
        "Here is a riddle for you. " + FERRY + " Answer in French, please, and explain the traffic on the lake as well.",
        FERRY.replace("12 cars", "15 cars") + BOXED,
        FERRY.replace("a week", "a month").replace("lake", "bay") + BOXED,
        FERRY[: len(FERRY) // 2],
    ],
)
def test_a_question_is_found_in_other_dress(text):
    match = MATH.match(row(text))
    assert match is not None
    assert match.benchmark == "bench"
    assert match.question.startswith("A ferry carries")


@pytest.mark.parametrize(
    "text",
    [
        "How many ferries does a lake with nine harbours need?" + BOXED,
        "Please reason step by step, and put your final answer within \\boxed{}.",
        "How many cars fit on a parking deck with four rows of twelve places each, when every third place is taken?" + BOXED,
        "Tell me about the history of baking.",
    ],
)
def test_shared_wording_is_no_question(text):
    assert MATH.match(row(text)) is None


def test_a_turn_of_a_long_chat_counts():
    assert MATH.match(row("Hello!", FERRY, "Thanks.")) is not None


def test_wording_counts_where_nothing_tells_it_from_content():
    """Two rows cannot say what is wording; the known templates can."""
    other = "Nine swimmers race each other round a buoy." + BOXED
    assert index(FERRY + BOXED, templates=[BOXED]).match(row(other)) is None
    assert index("Short one." + BOXED, templates=[BOXED]).match(row(other)) is None
    assert index("Short one." + BOXED, templates=[BOXED]).match(row("Short one.")) is not None


def test_short_questions_want_all_their_words_in_one_piece():
    short = index(*MBPP)
    assert short.match(row("Hi! Write a function to find the volume of a sphere, with tests.")) is not None
    for text in ("Write a function to find the volume of a cone.", "What is the volume of a sphere?", "Find the last vowel in a word."):
        assert short.match(row(text)) is None


def test_a_stock_phrase_makes_no_question():
    one = index("Write a function to sort a given matrix in ascending order according to the sum of its rows.")
    assert one.match(row("Write a function which sorts the integers in ascending order according to the sum of their digits.")) is None
    assert one.match(row("Sort a given matrix in ascending order according to the sum of its columns.")) is not None


def test_a_question_of_a_few_words_wants_to_be_all_that_is_asked():
    tiny = index("Why rain?", templates=[BOXED])
    assert tiny.match(row("why rain")) is not None
    assert tiny.match(row("Why rain?" + BOXED)) is not None
    assert tiny.match(row("Tell me why rain falls.")) is None


def test_text_without_spaces_is_compared_by_character():
    question = "一艘渡轮每天往返九次，每次运送十二辆汽车。一周内有多少辆汽车过湖？"
    assert index(question).match(row("请回答：" + question.replace("九", "八"))) is not None
    assert index(question).match(row("请问今天的天气怎么样？我想去湖边散步。")) is None


def test_a_judged_row_is_counted_with_what_it_repeats():
    judge = index(FERRY, BAKER)
    with pytest.raises(RowRejected, match="shares 100% with a question of bench: 'A ferry carries") as rejected:
        judge.judge(row(FERRY))
    assert rejected.value.reason == REASON
    judge.judge(row("Something else altogether, if you please, about gardens and their gates."))
    assert [(found.messages[0].content, match.benchmark) for found, match in judge.found] == [(FERRY, "bench")]


def test_no_benchmarks_match_nothing():
    assert BenchmarkIndex([]).match(row(FERRY)) is None


VOCABULARY = [f"w{i}" for i in range(400)]
TEXTS = st.lists(st.sampled_from(VOCABULARY), min_size=16, max_size=40, unique=True)


@relaxed
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), data=st.data())
def test_every_question_is_found_and_the_order_of_the_benchmark_does_not_matter(texts, data):
    questions = [" ".join(words) for words in texts]
    one, other = index(*questions), index(*data.draw(st.permutations(questions)))
    for question in questions:
        matches = [i.match(row(question + BOXED)) for i in (one, other)]
        assert [m and m.share for m in matches] == [1.0, 1.0]
    unseen = " ".join(f"u{i}" for i in range(30))
    assert one.match(row(unseen)) is None


@relaxed
@given(words=st.lists(st.sampled_from(VOCABULARY), min_size=20, max_size=40, unique=True), keep=st.integers(0, 20))
def test_the_share_is_that_of_a_naive_count(words, keep):
    other = [*words[:keep], *(f"u{i}" for i in range(30 - keep))]
    ours = {tuple(words[i : i + 4]) for i in range(len(words) - 3)}
    theirs = {tuple(other[i : i + 4]) for i in range(len(other) - 3)}
    share, common = len(ours & theirs) / min(len(ours), len(theirs)), len(ours & theirs)
    match = index(" ".join(words)).match(row(" ".join(other)))
    assert (match is not None) == (share >= 0.4 and common >= 7)
    if match:
        assert match.share == pytest.approx(share)
