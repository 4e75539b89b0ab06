"""What `prepare` made of the prompts: a corpus, its figures, and the tables that show them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from corpus.benchmarks import BenchmarkRows
from corpus.contamination import RULE, Match
from corpus.conversation import Conversation
from corpus.lengths import histogram
from corpus.masks import MaskReport
from corpus.sources import Source

_BAR = 40  # characters of the longest bar
_EXAMPLES, _QUOTED = 50, 300  # dropped prompts for a person to judge, and how much of each
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Prepared:
    """A corpus and what happened on the way to it.

    Attributes:
        sources: those of the training prompts, then those of the held-out ones if they have their own.
        benchmarks: the sets whose questions were kept out of the training prompts.
        overlaps: the prompts that repeat one of them, each with what it repeats.
        lengths: tokens by conversation id, counted by the tokenizer of the target named `tokenizer`.
        masks: None where no row may bring its own answers.
    """

    train: list[Conversation]
    heldout: list[Conversation]
    sources: list[Source]
    benchmarks: list[BenchmarkRows]
    overlaps: Sequence[tuple[Conversation, Match]]
    lengths: dict[str, int]
    tokenizer: str
    max_tokens: int | None
    masks: MaskReport | None

    def summary(self) -> dict[str, Any]:
        """Every figure, as plain data."""
        lengths = sorted(self.lengths[row.id] for row in self.train)
        return {
            "read": sum(source.read for source in self.sources),
            "train": len(self.train),
            "heldout": len(self.heldout),
            "train_domains": _counts(row.domain for row in self.train),
            "heldout_domains": _counts(row.domain for row in self.heldout),
            "dropped": dict(sum((source.dropped for source in self.sources), Counter[str]()).most_common()),
            "sources": [source.to_json() for source in self.sources],
            "train_by_source": self._by_source(),
            "tokens": {
                "counted": f"message texts by the tokenizer of {self.tokenizer}, without the chat template's markup",
                "limit": self.max_tokens,
                "train": sum(lengths),
                "heldout": sum(self.lengths[row.id] for row in self.heldout),
                "median": lengths[len(lengths) // 2],
                "longest": lengths[-1],
                "histogram": [{"from": low, "to": high, "rows": rows} for low, high, rows in histogram(lengths)],
            },
            "decontamination": self._decontamination(),
            "masks": self.masks.to_json() if self.masks else None,
        }

    def _by_source(self) -> dict[str, dict[str, int]]:
        """Rows and tokens of the training part, by the source that each row names."""
        groups: dict[str, dict[str, int]] = {}
        for row in self.train:
            group = groups.setdefault(row.source, {"rows": 0, "tokens": 0})
            group["rows"] += 1
            group["tokens"] += self.lengths[row.id]
        return dict(sorted(groups.items()))

    def _decontamination(self) -> dict[str, Any]:
        return {
            "benchmarks": {rows.label: {"origin": rows.origin, "rows": len(rows.conversations)} for rows in self.benchmarks},
            "rule": RULE if self.benchmarks else None,
            "dropped": len(self.overlaps),
            "found": _counts(match.benchmark for _, match in self.overlaps),
            "examples": [
                {
                    "prompt": row.messages[-1].content[:_QUOTED],
                    "repeats": match.question[:_QUOTED],
                    "of": match.benchmark,
                    "share": match.share,
                }
                for row, match in self.overlaps[:_EXAMPLES]
            ],
        }


def print_tables(summary: Mapping[str, Any], console: Console) -> None:
    """What became of every row by source, what the training part is made of, and how long its prompts are."""
    rows = Table(title="rows", title_justify="left")
    for name in ("source", "read", "kept", "not drawn"):
        rows.add_column(name, justify="left" if name == "source" else "right", overflow="fold")
    rows.add_column("dropped", no_wrap=True)
    rows.add_column("repaired", no_wrap=True)
    for source in summary["sources"]:
        told = [str(source[name]) for name in ("read", "kept", "not_drawn")]
        rows.add_row(source["name"], *told, _listed(source["dropped"], "\n"), _listed(source["repaired"], "\n"))
    console.print(rows)

    parts = Table(title="training prompts by source", title_justify="left")
    parts.add_column("source")
    for name in ("rows", "tokens", "share of tokens"):
        parts.add_column(name, justify="right")
    total = max(summary["tokens"]["train"], 1)
    for source, part in summary["train_by_source"].items():
        parts.add_row(source, str(part["rows"]), str(part["tokens"]), f"{part['tokens'] / total:.1%}")
    console.print(parts)

    bins = summary["tokens"]["histogram"]
    most = max(one["rows"] for one in bins)
    chart = Table(title=f"training prompts by length ({summary['tokens']['counted']})", title_justify="left", box=None)
    for name in ("tokens", "rows"):
        chart.add_column(name, justify="right")
    chart.add_column()
    for one in bins:
        span = str(one["from"]) if one["from"] == one["to"] else f"{one['from']}-{one['to']}"
        chart.add_row(span, str(one["rows"]), _bar(one["rows"] / most))
    console.print(chart)


def screen(summary: Mapping[str, Any]) -> dict[str, str]:
    """The lines of the closing table."""
    tokens, compared = summary["tokens"], summary["decontamination"]
    lines = {
        "read": str(summary["read"]),
        "training": f"{summary['train']} ({_listed(summary['train_domains'])})",
        "held out": f"{summary['heldout']} ({_listed(summary['heldout_domains'])})",
        "dropped": _listed(summary["dropped"]),
        "tokens": f"{tokens['train']} in training prompts, median {tokens['median']}, longest {tokens['longest']}"
        + (f", limit {tokens['limit']}" if tokens["limit"] else ""),
        "benchmarks": "not compared; name some with corpus.benchmarks",
        "supervised": "answers are the target's to give",
    }
    if compared["benchmarks"]:
        told = ", ".join(f"{label} ({one['rows']} rows)" for label, one in compared["benchmarks"].items())
        lines["benchmarks"] = f"questions repeated by prompts: {_listed(compared['found'])}; compared with {told}"
    if masks := summary["masks"]:
        lines["supervised"] = (
            f"{masks['supervised_share']:.1%} of the tokens of {masks['kept']} answered rows, "
            f"{masks['last_turn_only']} of them by their last turn only"
        )
    return lines


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _listed(counts: Mapping[str, int], between: str = ", ") -> str:
    return between.join(f"{count} {name}" for name, count in counts.items()) or "none"


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
