"""The nine evaluation sets, by name, from a local folder of JSONL files whose rows hold `turns`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corpus.conversation import Conversation
from corpus.errors import CorpusError
from corpus.sources import SourceSpec, read_source


@dataclass(frozen=True)
class Benchmark:
    """An evaluation set: its file is `<name>.jsonl`; `rows` is how many the published protocol uses, the first ones of the file."""

    name: str
    title: str
    domain: str
    rows: int


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gsm8k", "GSM8K", "math", 500),
        Benchmark("math500", "MATH500", "math", 500),
        Benchmark("aime25", "AIME25", "math", 30),
        Benchmark("humaneval", "HumanEval", "code", 164),
        Benchmark("mbpp", "MBPP", "code", 256),
        Benchmark("livecodebench", "LiveCodeBench", "code", 500),
        Benchmark("mt-bench", "MT-Bench", "chat", 80),
        Benchmark("alpaca", "Alpaca", "chat", 500),
        Benchmark("arena-hard-v2", "Arena-Hard-v2", "chat", 500),
    )
}


def load_benchmark(name: str, folder: str | Path, limit: int | None = None) -> list[Conversation]:
    """The questions of one benchmark, in the file's order; every conversation carries the benchmark's name and domain.

    Args:
        name: a key of `BENCHMARKS`; case, spaces and underscores do not matter.
        folder: where the `<name>.jsonl` files lie.
        limit: at most this many rows instead of the protocol's number.

    Raises:
        CorpusError: unknown name, missing file, no usable row, or rows that had to be dropped: a benchmark with holes
            measures another thing.
    """
    benchmark = BENCHMARKS.get(name.strip().lower().replace("_", "-").replace(" ", "-"))
    if benchmark is None:
        raise CorpusError(f"unknown benchmark {name!r}. Known are {', '.join(BENCHMARKS)}.")
    path = Path(folder) / f"{benchmark.name}.jsonl"
    conversations, report = read_source(SourceSpec(str(path), label=benchmark.name, domain=benchmark.domain))
    broken = {reason: count for reason, count in report.dropped.items() if reason != "duplicate"}
    if broken:
        raise CorpusError(f"{path} has rows that cannot be used: {broken}, such as {next(iter(report.examples.values()))}. Mend the file.")
    return conversations[: benchmark.rows if limit is None else limit]
