"""The comparison as tables: in the form of the paper's Table 1, as Markdown, and as plain rows for JSON and W&B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.report_data import DrafterResult, Estimate, EvaluationReport, Score, Timing

COLUMNS = (
    "drafter",
    "set",
    "domain",
    "prompts",
    "tokens",
    "rounds",
    "tau",
    "tau_low",
    "tau_high",
    "tau_per_request",
    "tau_per_request_low",
    "tau_per_request_high",
    "verify_rate",
    "verify_waste",
    "wall_clock_ratio",
    "plain_seconds",
    "drafted_seconds",
    "draft_seconds",
    "head_seconds",
    "verify_seconds",
)


@dataclass(frozen=True)
class Cell:
    """A value as shown, and in small print what belongs to it."""

    text: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells below two lines of heads: groups of columns with their widths, then the columns."""

    title: str
    groups: tuple[tuple[str, int], ...]
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    about: str = ""


def accepted_length_table(report: EvaluationReport) -> Table:
    """Accepted length by benchmark with intervals, drafters below each other, then how far the first surpasses the others."""
    order = _order(report.drafters[0])
    rows = []
    for result in report.drafters:
        found = {score.name: score for score in result.benchmarks}
        cells = [_tau(found[name].tau_pooled) for name in order]
        rows.append((Cell(result.name, result.kind), *cells, _tau(result.tau_macro)))
    first = {score.name: score.tau_pooled.value for score in report.drafters[0].benchmarks}
    others = {result.name: {score.name: score.tau_pooled.value for score in result.benchmarks} for result in report.drafters}
    for gain in report.gains:
        cells = [_percent(first[name] / others[gain.over][name] - 1) for name in order]
        rows.append((Cell(f"{gain.drafter} over {gain.over}"), *cells, _gain(gain.value)))
    about = (
        "Tokens per verification round, pooled, with 95 % intervals over requests; macro is the mean over benchmarks. Gains resample the "
        "same prompts for both drafters."
    )
    return Table("Accepted length τ", _groups(report.drafters[0], order), ("drafter", *order, "macro"), tuple(rows), about)


def speed_table(report: EvaluationReport) -> Table:
    """Wall clock against plain decoding by benchmark."""
    order = _order(report.drafters[0])
    rows = []
    for result in report.drafters:
        found = {score.name: score for score in result.benchmarks}
        cells = [_times(found[name].timing.ratio) for name in order]
        plain = sum(score.timing.plain_seconds for score in result.benchmarks)
        drafted = sum(score.timing.drafted_seconds for score in result.benchmarks)
        tokens = sum(score.timing.drafted_tokens for score in result.benchmarks), sum(s.timing.plain_tokens for s in result.benchmarks)
        whole = tokens[0] / drafted / (tokens[1] / plain) if min(plain, drafted, *tokens) > 0 else None
        rows.append((Cell(result.name), *cells, _times(whole)))
    return Table("Times as fast as plain decoding", _groups(report.drafters[0], order), ("drafter", *order, "all"), tuple(rows))


def comparison_tables(report: EvaluationReport) -> tuple[Table, ...]:
    """The tables that a report of several drafters or benchmarks shows; none where there is one of each."""
    if len(report.drafters) < 2 and (not report.drafters or len(report.drafters[0].benchmarks) < 2):
        return ()
    return accepted_length_table(report), speed_table(report)


def round_tables(report: EvaluationReport) -> tuple[Table, ...]:
    """Where the time of a round goes, as one table; none where it was not measured."""
    rows = [(result.name, round_profile(result)) for result in report.drafters]
    measured = [
        (
            Cell(name),
            Cell(f"{profile['round_ms']:.1f}"),
            *(Cell(f"{profile[f'{stage}_ms']:.1f}", f"{100 * profile[f'{stage}_share']:.1f} %") for stage in STAGES),
            Cell(f"{profile['plain_round_ms']:.1f}"),
        )
        for name, profile in rows
        if profile
    ]
    if not measured:
        return ()
    about = (
        "Milliseconds of a round, the prompt left out, and shares of it. draft: the drafter's backbone and context; head: its LM head, "
        "sequential and confidence heads, choosing tokens; verify: the target's pass and LM head; outside: acceptance, scheduling, Python."
    )
    head = ("drafter", "round", *STAGES, "plain round")
    return (Table("Where the time of a round goes, ms", (("", len(head)),), head, tuple(measured), about),)


STAGES = ("draft", "head", "verify", "outside")


def round_profile(result: DrafterResult) -> dict[str, float]:
    """Mean milliseconds of a request's round (in a batch its share of the batch's) and of its stages, their shares, and of a plain round.

    Empty where a stage was not measured.
    """
    timings, rounds = [score.timing for score in result.benchmarks], sum(score.rounds for score in result.benchmarks)
    if not timings or not rounds or not all(timing.shares for timing in timings):
        return {}
    whole = Timing(*(sum(values) for values in zip(*(vars(timing).values() for timing in timings), strict=True)))
    milliseconds = 1000 * (whole.drafted_seconds - (whole.prefill_seconds or 0.0)) / rounds
    parts = {f"{stage}_ms": share * milliseconds for stage, share in whole.shares.items()}
    shares = {f"{stage}_share": share for stage, share in whole.shares.items()}
    # Plainly, every token but a text's first is a round.
    plain_rounds = whole.plain_tokens - sum(score.prompts for score in result.benchmarks)
    plain = 1000 * (whole.plain_seconds - (whole.plain_prefill_seconds or 0.0)) / plain_rounds if plain_rounds else float("nan")
    return {"round_ms": milliseconds, **parts, **shares, "plain_round_ms": plain}


def markdown(table: Table) -> str:
    """A table in Markdown; groups of columns are said in the heads."""
    spans = [name for name, width in table.groups for _ in range(width)]
    head = [f"{name} ({span})" if span else name for name, span in zip(table.head, spans, strict=True)]
    lines = [f"| {' | '.join(map(_plain, head))} |", f"| {' | '.join(['---'] + ['---:'] * (len(head) - 1))} |"]
    for row in table.rows:
        lines.append(f"| {' | '.join(_plain(f'{cell.text} ({cell.detail})' if cell.detail else cell.text) for cell in row)} |")
    return "\n".join(lines)


def markdown_report(report: EvaluationReport) -> str:
    """Tables, positions and settings as one Markdown text."""
    parts = [f"# {_plain(report.title)}", *(_plain(note) for note in report.notes)]
    settings = report.settings
    parts.append(
        f"{report.prompts:,} prompts, temperature {settings.temperature:g}, at most {settings.max_new_tokens:,} new tokens, batch "
        f"{settings.batch_size}, {settings.dtype}, seed {settings.seed}. {report.facts.machine}, {report.facts.date}."
    )
    for table in (*comparison_tables(report), *round_tables(report)):
        parts += [f"## {_plain(table.title)}", markdown(table)]
    positions = [["drafter", "domain", *(f"@{k + 1}" for k in range(_depth(report)))]]
    for result in report.drafters:
        for score in result.domains:
            values = [f"{ratio.value:.3f}" if ratio.trials else "-" for ratio in score.acceptance.conditional]
            if values:
                positions.append([result.name, score.name, *values, *["-"] * (_depth(report) - len(values))])
    if len(positions) > 1:
        rows = [f"| {' | '.join(map(_plain, row))} |" for row in positions]
        parts += ["## Accepted given all before (`accept_cond@k`)", "\n".join([rows[0], f"|{' --- |' * len(positions[0])}", *rows[1:]])]
    if report.facts.command:
        parts.append(f"`{_code(report.facts.command)}`")
    return "\n\n".join(parts) + "\n"


def long_rows(report: EvaluationReport) -> list[dict[str, Any]]:
    """One row a drafter and benchmark, then one a drafter and domain (`set` is `domain:NAME`), then its macro average; see COLUMNS."""
    rows = []
    for result in report.drafters:
        rows += [_row(result.name, score.name, score) for score in result.benchmarks]
        rows += [_row(result.name, f"domain:{score.name}", score) for score in result.domains]
        macro = result.tau_macro
        empty: dict[str, Any] = dict.fromkeys(COLUMNS)
        rows.append({**empty, "drafter": result.name, "set": "macro", "tau": macro.value, "tau_low": macro.low, "tau_high": macro.high})
    return rows


def _row(drafter: str, name: str, score: Score) -> dict[str, Any]:
    timing, pooled, mean = score.timing, score.tau_pooled, score.tau_per_request
    values = (
        drafter,
        name,
        score.domain,
        score.prompts,
        score.tokens,
        score.rounds,
        pooled.value,
        pooled.low,
        pooled.high,
        mean.value,
        mean.low,
        mean.high,
        score.verify_rate.value if score.verify_rate.trials else None,
        score.verify_waste.value if score.verify_waste.trials else None,
        timing.ratio,
        timing.plain_seconds,
        timing.drafted_seconds,
        timing.draft_seconds,
        timing.head_seconds,
        timing.verify_seconds,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _order(result: DrafterResult) -> list[str]:
    """Benchmarks with those of one domain side by side, domains as they come first."""
    domains = list(dict.fromkeys(score.domain for score in result.benchmarks))
    return [score.name for domain in domains for score in result.benchmarks if score.domain == domain]


def _groups(result: DrafterResult, order: Sequence[str]) -> tuple[tuple[str, int], ...]:
    domain_of = {score.name: score.domain for score in result.benchmarks}
    domains = list(dict.fromkeys(domain_of[name] for name in order))
    return ("", 1), *((domain, sum(domain_of[name] == domain for name in order)) for domain in domains), ("", 1)


def _depth(report: EvaluationReport) -> int:
    return max((len(s.acceptance.conditional) for result in report.drafters for s in result.domains), default=0)


def _tau(tau: Estimate) -> Cell:
    return Cell(f"{tau.value:.2f}", "" if tau.low is None or tau.high is None else f"{tau.low:.2f}–{tau.high:.2f}")


def _percent(share: float) -> Cell:
    return Cell(f"{100 * share:+.1f} %")


def _gain(gain: Estimate) -> Cell:
    detail = "" if gain.low is None or gain.high is None else f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
    return Cell(f"{100 * gain.value:+.1f} %", detail)


def _times(ratio: float | None) -> Cell:
    return Cell("–" if ratio is None else f"{ratio:.2f}×")


def _plain(text: str) -> str:
    """Text that cannot break out of a Markdown cell or become markup."""
    for sign in "\\|<>`*_[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def _code(text: str) -> str:
    """Text that stays inside a code span."""
    return " ".join(text.replace("`", "'").split())
