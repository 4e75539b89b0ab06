"""Training prompts that a benchmark already asks: found by shared words, whatever instructions stand around them.

Benchmarks wrap their questions in wording ("Please reason step by step, ..."), and training prompts of the same kind carry the same
wording; counting it would drop them all. So wording is found first and cut out of both sides: every run of `WORDING_WORDS` words that
stands in at least `WORDING_ROWS` rows of the benchmarks, and the prompt templates that this project knows. What remains is compared:

- A benchmark question is *content*: its runs of `GRAM` words, wording cut out. A training row counts as the same question if at least
  `SHARE` of the runs of the shorter one of the two stand in the other, and at least `FEWEST` runs (all of them, where there are fewer):
  ten words in one piece, or more in several. Less than that is a stock phrase of the trade ("in ascending order according to the sum of").
- A question with fewer than `SHORT` runs says too little in content ("Write a function to find the volume of a sphere"). It is the
  same only if the row holds all its words in one piece, known templates aside; under `GRAM` words, only if the row asks nothing else.

Words are compared in lower case, punctuation ignored. The verdict over a row depends on nothing but the row and the benchmarks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from corpus.conversation import Conversation
from corpus.errors import RowRejected

WORDING_WORDS, WORDING_ROWS = 5, 3
GRAM, SHARE, FEWEST, SHORT = 4, 0.4, 7, 3
REASON = "benchmark_overlap"
RULE = (
    f"{SHARE:.0%} of the {GRAM}-word runs of the shorter of the two shared, at least {FEWEST}; wording ({WORDING_WORDS} words in "
    f"{WORDING_ROWS} benchmark rows, or of a known prompt template) left out"
)

# Languages written without spaces are compared character by character.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")

Words = list[str]
Gram = tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """A training row that repeats a benchmark question. `share` is of the shorter one's content runs."""

    benchmark: str
    question: str
    share: float


class BenchmarkIndex:
    """The questions that rows are compared with."""

    def __init__(self, questions: Sequence[Conversation], templates: Iterable[str] = ()) -> None:
        """Index benchmark rows; `source` of each names its set.

        Args:
            templates: prompt templates whose words are wording in any case.
        """
        self.questions = list({question.near_key: question for question in questions}.values())
        counts = Counter(gram for question in self.questions for gram in _distinct(_turns(question), WORDING_WORDS))
        self._templates = {gram for text in templates for gram in _grams(_words(text), WORDING_WORDS)}
        self._wording = self._templates | {gram for gram, count in counts.items() if count >= WORDING_ROWS}
        self._sizes: list[int] = []
        self._holders: dict[Gram, list[int]] = defaultdict(list)
        self._short: dict[Gram, list[int]] = defaultdict(list)
        for number, question in enumerate(self.questions):
            content = self._content(question)
            self._sizes.append(len(content))
            if len(content) < SHORT:
                self._short[tuple(word for turn in self._bare_turns(question) for word in turn)].append(number)
            else:
                for gram in content:
                    self._holders[gram].append(number)
        self.found: list[tuple[Conversation, Match]] = []
        self._short_lengths = sorted({len(words) for words in self._short if words})

    def match(self, conversation: Conversation) -> Match | None:
        """The benchmark question that this row repeats, the one with the largest share; None where it repeats none."""
        found = [*self._long_matches(conversation), *self._short_matches(conversation)]
        if not found:
            return None
        share, number = max(found, key=lambda pair: (pair[0], -pair[1]))
        question = self.questions[number]
        return Match(question.source, " ".join(m.content for m in question.messages if m.role == "user"), share)

    def judge(self, conversation: Conversation) -> None:
        """Raise RowRejected for a row that repeats a benchmark question, and note both in `found`."""
        match = self.match(conversation)
        if match is not None:
            self.found.append((conversation, match))
            raise RowRejected(REASON, f"shares {match.share:.0%} with a question of {match.benchmark}: {match.question[:80]!r}")

    def _long_matches(self, conversation: Conversation) -> Iterator[tuple[float, int]]:
        content = self._content(conversation)
        hits = Counter(number for gram in content for number in self._holders.get(gram, ()))
        for number, count in hits.items():
            size = self._sizes[number]
            share = count / min(size, len(content))
            if count >= min(FEWEST, size) and share >= SHARE:
                yield share, number

    def _short_matches(self, conversation: Conversation) -> Iterator[tuple[float, int]]:
        turns = self._bare_turns(conversation)
        for length in self._short_lengths:
            asked = _distinct(turns, length) if length >= GRAM else {tuple(turn) for turn in turns}
            for gram in asked:
                for number in self._short.get(gram, ()):
                    yield 1.0, number

    def _content(self, conversation: Conversation) -> set[Gram]:
        return {gram for turn in _turns(conversation) for piece in _without(turn, self._wording) for gram in _grams(piece, GRAM)}

    def _bare_turns(self, conversation: Conversation) -> list[Words]:
        """The words of each user message without the known templates."""
        return [[word for piece in _without(turn, self._templates) for word in piece] for turn in _turns(conversation)]


def _without(words: Words, wording: set[Gram]) -> Iterator[Words]:
    """The stretches of a text between its wording."""
    cut = [False] * len(words)
    for start, gram in enumerate(_grams(words, WORDING_WORDS)):
        if gram in wording:
            cut[start : start + WORDING_WORDS] = [True] * WORDING_WORDS
    for is_cut, run in itertools.groupby(zip(words, cut, strict=True), key=lambda pair: pair[1]):
        if not is_cut:
            yield [word for word, _ in run]


def _turns(conversation: Conversation) -> list[Words]:
    """The words of each user message."""
    return [_words(message.content) for message in conversation.messages if message.role == "user"]


def _words(text: str) -> Words:
    return _WORD.findall(text.casefold())


def _grams(words: Words, size: int) -> Iterator[Gram]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def _distinct(turns: Iterable[Words], size: int) -> set[Gram]:
    return {gram for turn in turns for gram in _grams(turn, size)}
