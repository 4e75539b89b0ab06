"""What happened to every answer, counted; and the data set card that says so, as JSON and as Markdown."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from corpus.answers import FAILED, FINISH_REASONS, REASONS, AnsweredRow, unusable
from corpus.loops import LoopRule, is_looping


@dataclass
class Tally:
    """Rows and tokens of a part of the answers; `usable_prompt_tokens` and `supervised_tokens` are those of its usable rows."""

    rows: int = 0
    usable: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    usable_prompt_tokens: int = 0
    supervised_tokens: int = 0

    def add(self, row: AnsweredRow, good: bool) -> None:
        prompt, answer = len(row.prompt_ids), len(row.answer_ids)
        self.rows += 1
        self.prompt_tokens += prompt
        self.answer_tokens += answer
        if good:
            self.usable += 1
            self.usable_prompt_tokens += prompt
            self.supervised_tokens += answer

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens of the usable rows; 0 where there is none."""
        total = self.usable_prompt_tokens + self.supervised_tokens
        return self.supervised_tokens / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "supervised_share": self.supervised_share}


@dataclass
class AnswerSummary:
    """Counts over answers. `finish_reasons` counts every row by how it ended; `unusable` gives each unusable row one reason.

    Attributes:
        looping: all rows that loop, the truncated ones among them.
        same_prompts: rows whose prompt is, token by token, that of an earlier row.
        same_answers: rows whose answer is, token by token, that of an earlier row; empty ones aside.
        failures: failed rows by their error, numbers left out.
        lengths: rows by how many tokens the answer has, in bins that double.
    """

    total: Tally = field(default_factory=Tally)
    by_source: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_domain: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    finish_reasons: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    looping: int = 0
    same_prompts: int = 0
    same_answers: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data; every finish reason and every reason of `REASONS` is listed, also at zero."""
        return {
            **self.total.to_json(),
            "unusable": {reason: self.unusable[reason] for reason in REASONS},
            "finish_reasons": {reason: self.finish_reasons[reason] for reason in FINISH_REASONS},
            "looping": self.looping,
            "same_prompts": self.same_prompts,
            "same_answers": self.same_answers,
            "failures": dict(self.failures.most_common()),
            "answer_lengths": {_bin_name(bits): self.lengths[bits] for bits in range(max(self.lengths, default=-1) + 1)},
            "by_source": {name: tally.to_json() for name, tally in sorted(self.by_source.items())},
            "by_domain": {name: tally.to_json() for name, tally in sorted(self.by_domain.items())},
        }


def summarize(
    rows: Iterable[AnsweredRow], stop_ids: Collection[int], loops: LoopRule | None = None, keep_truncated: bool = False
) -> AnswerSummary:
    """Count what happened to every answer; the arguments are those of `unusable`."""
    summary = AnswerSummary()
    prompts: set[int] = set()
    answers: set[int] = set()
    for row in rows:
        reason = unusable(row, stop_ids, loops, keep_truncated)
        for tally in (summary.total, summary.by_source[row.source], summary.by_domain[row.domain]):
            tally.add(row, good=reason is None)
        summary.finish_reasons[row.finish_reason] += 1
        if reason is not None:
            summary.unusable[reason] += 1
        if row.finish_reason == FAILED:
            summary.failures[re.sub(r"\d+", "N", row.error)] += 1
        summary.looping += is_looping(row.answer_ids, loops or LoopRule())
        summary.lengths[len(row.answer_ids).bit_length()] += 1
        if len(row.prompt_ids):
            summary.same_prompts += _seen(row.prompt_ids.tobytes(), prompts)
        if len(row.answer_ids):
            summary.same_answers += _seen(row.answer_ids.tobytes(), answers)
    return summary


def _seen(content: bytes, known: set[int]) -> bool:
    """Whether it came before; its 64-bit hash is remembered."""
    key = hash(content)
    if key in known:
        return True
    known.add(key)
    return False


def _bin_name(bits: int) -> str:
    """Of the numbers that need `bits` bits: 0, 1, 2-3, 4-7, 8-15, ..."""
    first, last = (1 << bits) >> 1, (1 << bits) - 1
    return str(first) if first == last else f"{first}-{last}"


# -- the card


def card_markdown(card: Mapping[str, Any]) -> str:
    """The card for people: everything that its JSON says, in tables.

    Args:
        card: `name`, `rows` (`AnswerSummary.to_json`), and further sections, each a mapping of figures or texts.
    """
    rows = card["rows"]
    count = max(rows["rows"], 1)
    sections = [
        f"# {card['name']}",
        "Rows are prompts and answers as token ids. An answer of the target is what it generated, token by token; one that a row brought "
        "along is what the chat template makes of it. Exactly the answers are supervised, the stop token included. Shares are of all rows.",
        _table("Rows", ("", "rows", "share"), [("all", rows["rows"], ""), _share("usable", rows["usable"], count)]),
        _table("Left out of training", ("reason", "rows", "share"), [_share(k, v, count) for k, v in rows["unusable"].items()]),
        _table("How answers ended", ("finish reason", "rows", "share"), [_share(k, v, count) for k, v in rows["finish_reasons"].items()]),
        _table(
            "Repetition",
            ("", "rows", "share"),
            [
                _share("looping, truncated ones included", rows["looping"], count),
                _share("prompt equal to an earlier one", rows["same_prompts"], count),
                _share("answer equal to an earlier one", rows["same_answers"], count),
            ],
        ),
    ]
    if rows["failures"]:
        sections.append(_table("Failed rows", ("error", "rows"), list(rows["failures"].items())))
    columns = ("rows", "usable", "prompt tokens", "answer tokens", "supervised tokens", "supervised share of usable rows")
    tallies = {"Domains": rows["by_domain"], "Sources": rows["by_source"]}
    for title, groups in tallies.items():
        lines = [(name or "(none)", *_figures(tally)) for name, tally in groups.items()]
        sections.append(_table(title, ("", *columns), [*lines, ("**all**", *_figures(rows))]))
    sections.append(_table("Answer lengths", ("tokens", "rows", "share"), [_share(k, v, count) for k, v in rows["answer_lengths"].items()]))
    for title, facts in card.items():
        if title not in ("name", "rows"):
            lines = list(facts.items()) if isinstance(facts, Mapping) else [("", facts)]
            sections.append(_table(title.replace("_", " ").capitalize(), ("", ""), lines))
    return "\n\n".join(sections) + "\n"


def _figures(tally: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("rows", "usable", "prompt_tokens", "answer_tokens", "supervised_tokens")
    return (*(tally[name] for name in names), f"{tally['supervised_share']:.1%}")


def _share(name: str, rows: int, count: int) -> tuple[str, int, str]:
    return (name, rows, f"{rows / count:.1%}")


def _table(title: str, head: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> str:
    rendered = ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]
    return "\n".join([f"## {title}", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rendered])


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
