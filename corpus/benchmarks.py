"""The nine evaluation sets by name: from the hub, from a local folder, or a bundled mini set where there is no network.

From the hub each question is put into the wording that published evaluations of drafters use. A folder holds `<name>.jsonl` files whose
rows have `turns`, already worded: the published protocol's own rows come in this layout. The mini set holds a few rows that were written
for this project in the manner of each set. It stands in where the hub cannot be reached and calls itself `<name>-mini` everywhere, so
that no figure on it is taken for one on the real set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from corpus.conversation import Conversation
from corpus.errors import CorpusError, RowRejected
from corpus.hub import HubSet, HubUnreachable, hub_rows
from corpus.rows import parse_row
from corpus.sources import SourceSpec, bundled_rows, read_source

HUB, BUNDLED = "hub", "bundled"
MINI = "bundled mini set"

MATH_WORDING = "Please reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL_WORDING = "Write a solution to the following problem and make sure that it passes the tests:"
LIVECODEBENCH_WORDING = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests. You will NOT return anything except for the program"
)
_GIVEN_CODE = "### Format: Use the following code structure:"
_FREE_CODE = "### Format: Write your code in the following format:"
_ANSWER_HERE = "### Answer: (use the provided format with backticks)"
# What surrounds questions and is none of them.
WORDING = (MATH_WORDING, HUMANEVAL_WORDING, LIVECODEBENCH_WORDING, _GIVEN_CODE, _FREE_CODE, _ANSWER_HERE)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """An evaluation set.

    Attributes:
        rows: how many the published protocol uses; the first ones are taken.
        hub: where its questions lie.
        turns: the user's turns of one of the hub's rows in the set's wording; None for a row that is not part of the set.
    """

    name: str
    title: str
    domain: str
    rows: int
    hub: HubSet
    turns: Callable[[Row], list[str] | None]


def _math(field: str) -> Callable[[Row], list[str]]:
    return lambda row: [f"{row[field]}\n{MATH_WORDING}"]


def _humaneval(row: Row) -> list[str]:
    return [f"{HUMANEVAL_WORDING}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    frame, code = (_GIVEN_CODE, row["starter_code"]) if row["starter_code"] else (_FREE_CODE, "# YOUR CODE HERE")
    question = f"### Question:\n{row['question_content']}"
    return [f"{LIVECODEBENCH_WORDING}\n\n{question}\n\n{frame}\n```python\n{code}\n```\n\n{_ANSWER_HERE}"]


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gsm8k", "GSM8K", "math", 500, HubSet("openai/gsm8k", "main", "test"), _math("question")),
        Benchmark("math500", "MATH500", "math", 500, HubSet("HuggingFaceH4/MATH-500", split="test"), _math("problem")),
        Benchmark("aime25", "AIME25", "math", 30, HubSet("MathArena/aime_2025"), _math("problem")),
        Benchmark("humaneval", "HumanEval", "code", 164, HubSet("openai/openai_humaneval", split="test"), _humaneval),
        Benchmark("mbpp", "MBPP", "code", 256, HubSet("google-research-datasets/mbpp", "sanitized", "test"), lambda row: [row["prompt"]]),
        Benchmark(
            "livecodebench",
            "LiveCodeBench",
            "code",
            500,
            # In order of publication; the data set itself is a script, which `datasets` no longer runs.
            HubSet(
                "livecodebench/code_generation_lite",
                split="test",
                files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
            ),
            _livecodebench,
        ),
        Benchmark("mt-bench", "MT-Bench", "chat", 80, HubSet("HuggingFaceH4/mt_bench_prompts"), lambda row: list(row["prompt"])),
        Benchmark(
            "alpaca",
            "Alpaca",
            "chat",
            500,
            HubSet("tatsu-lab/alpaca"),
            lambda row: None if row["input"] else [row["instruction"]],  # instructions that stand alone
        ),
        Benchmark(
            "arena-hard-v2",
            "Arena-Hard-v2",
            "chat",
            500,
            HubSet("lmarena-ai/arena-hard-auto", split="test", files=("data/arena-hard-v2.0/question.jsonl",)),
            lambda row: [row["prompt"]] if row["category"] == "hard_prompt" else None,  # the others are creative writing
        ),
    )
}


@dataclass(frozen=True)
class BenchmarkRows:
    """The questions of one set, in order; every conversation carries the set's label as its source, and its domain.

    `origin` says where they come from: a hub data set, a file, or `MINI`.
    """

    benchmark: Benchmark
    origin: str
    conversations: list[Conversation]

    @property
    def label(self) -> str:
        """What reports call these rows."""
        return f"{self.benchmark.name}-mini" if self.origin == MINI else self.benchmark.name


def load_benchmark(name: str, place: str | Path, limit: int | None = None) -> BenchmarkRows:
    """The questions of one benchmark.

    Args:
        name: a key of `BENCHMARKS`; case, spaces and underscores do not matter.
        place: "hub", "bundled", or the folder where the `<name>.jsonl` files lie.
        limit: at most this many rows instead of the protocol's number.

    Raises:
        CorpusError: unknown name, missing file or data set, no usable row, or rows that cannot be used: a benchmark with holes
            measures another thing.
    """
    benchmark = BENCHMARKS.get(name.strip().lower().replace("_", "-").replace(" ", "-"))
    if benchmark is None:
        raise CorpusError(f"unknown benchmark {name!r}. Known are {', '.join(BENCHMARKS)}.")
    count = benchmark.rows if limit is None else limit
    if place == HUB:
        try:
            return read_hub(benchmark, count)
        except HubUnreachable:
            return _mini(benchmark, count)
    if place == BUNDLED:
        return _mini(benchmark, count)
    return _read_file(benchmark, Path(place).expanduser() / f"{benchmark.name}.jsonl", count)


def load_benchmarks(place: str | Path, names: Sequence[str] | None = None, limit: int | None = None) -> list[BenchmarkRows]:
    """The sets of these names; without names all nine, or those that a folder has. `limit` as for `load_benchmark`.

    Raises:
        CorpusError: as for `load_benchmark`, and a folder with none of them.
    """
    if names is None and place in (HUB, BUNDLED):
        names = list(BENCHMARKS)
    if names is None:
        names = [name for name in BENCHMARKS if (Path(place).expanduser() / f"{name}.jsonl").is_file()]
        if not names:
            raise CorpusError(
                f"no benchmark in {place}. Name a folder with {', '.join(f'{name}.jsonl' for name in BENCHMARKS)} or some of them, "
                f"{HUB} for the Hugging Face hub, or {BUNDLED} for the project's mini set."
            )
    loaded: list[BenchmarkRows] = []
    for name in names:
        loaded.append(load_benchmark(name, place, limit))
        if place == HUB and loaded[-1].origin == MINI:
            place = BUNDLED  # nobody waits nine times for a hub that is out of reach
    return loaded


def read_hub(benchmark: Benchmark, count: int) -> BenchmarkRows:
    """The first `count` rows of a benchmark's data set, worded."""
    rows = islice(_worded(benchmark, hub_rows(benchmark.hub)), count)
    return BenchmarkRows(benchmark, f"hub data set {benchmark.hub.name}", _parsed(benchmark, benchmark.name, rows))


def _mini(benchmark: Benchmark, count: int) -> BenchmarkRows:
    own = ((place, row["row"]) for place, row in bundled_rows("benchmarks") if row["benchmark"] == benchmark.name)
    return BenchmarkRows(benchmark, MINI, _parsed(benchmark, f"{benchmark.name}-mini", islice(_worded(benchmark, own), count)))


def _read_file(benchmark: Benchmark, path: Path, count: int) -> BenchmarkRows:
    source = read_source(SourceSpec(str(path), label=benchmark.name, domain=benchmark.domain))
    if source.dropped:
        raise CorpusError(
            f"{path} has rows that cannot be used: {dict(source.dropped)}, such as {next(iter(source.examples.values()))}. Mend the file."
        )
    return BenchmarkRows(benchmark, str(path), source.rows[:count])


def _worded(benchmark: Benchmark, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for place, row in rows:
        if isinstance(row, RowRejected):
            raise CorpusError(f"{place} of {benchmark.hub.name} cannot be used: {row}.")
        try:
            turns = benchmark.turns(row)
        except (KeyError, TypeError) as error:
            raise CorpusError(
                f"{place} of {benchmark.hub.name} has no field {error}: the data set's layout is another one than this project knows. "
                f"Give a folder with {benchmark.name}.jsonl instead, each row with `turns`."
            ) from error
        if turns is not None:
            yield place, turns


def _parsed(benchmark: Benchmark, label: str, rows: Iterator[tuple[str, Sequence[str]]]) -> list[Conversation]:
    conversations = []
    for place, turns in rows:
        try:
            conversations.append(parse_row({"turns": list(turns)}, label, benchmark.domain))
        except RowRejected as error:
            raise CorpusError(f"{place} of {benchmark.hub.name} cannot be used: {error}.") from error
    if not conversations:
        raise CorpusError(f"{benchmark.hub.name} holds no row of {benchmark.title}.")
    return conversations
