"""The evaluation's report: one HTML page that works offline, in light and dark and on a phone; its essence as a picture; the figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipelines import comparison_figures as comparison
from pipelines import figures
from pipelines.figures import duration
from pipelines.page import publish
from pipelines.plain_data import ReportError
from pipelines.poster import poster
from pipelines.report_data import (
    Acceptance,
    DomainResult,
    Estimate,
    EvaluationReport,
    Facts,
    HeadCost,
    Ratio,
    Settings,
    StageTime,
    Timing,
    TrainingPoint,
    bootstrap_tau,
    training_points,
)
from pipelines.sample_text import Origin, SampleRound, SampleText, token_pieces
from pipelines.tables import comparison_tables, round_tables

__all__ = [
    "Acceptance",
    "DomainResult",
    "Estimate",
    "EvaluationReport",
    "Facts",
    "HeadCost",
    "Ratio",
    "ReportError",
    "SampleRound",
    "SampleText",
    "Settings",
    "StageTime",
    "Timing",
    "TrainingPoint",
    "bootstrap_tau",
    "comparisons",
    "render_html",
    "token_pieces",
    "training_points",
    "write_report",
]


@dataclass(frozen=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    detail: str
    main: bool = False


@dataclass(frozen=True)
class OriginLegend:
    """How one origin of tokens is named and explained."""

    name: Origin
    short: str
    meaning: str


ORIGINS = (
    OriginLegend("accepted", "accepted", "drafted, and the target agreed"),
    OriginLegend("bonus", "bonus", "the target's own, after a block that was accepted whole"),
    OriginLegend("correction", "correction", "the target's own, in place of a rejected draft"),
    OriginLegend("target", "target", "the target's own, nothing was drafted"),
)


def write_report(report: EvaluationReport, folder: Path | str) -> Path:
    """Write `report.html`, `report.png` and `figures/*.png|svg` into a folder.

    Each is finished beside its place and then moved there, so that no reader sees half a page.

    Args:
        report: what the evaluation found.
        folder: made when missing.

    Returns:
        Path of `report.html`.

    Raises:
        ReportError: the folder cannot be written.
    """
    folder = Path(folder)
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for name, figure in _figures(report).items():
            for suffix in (".png", ".svg"):
                publish(folder / "figures" / f"{name}{suffix}", partial(figures.save, figure))
        publish(folder / "report.png", partial(figures.save, poster(report), ground=None))
        page = render_html(report)
        publish(folder / "report.html", lambda path: path.write_text(page, encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot write the report to {folder}: {error.strerror or error}. Choose another output folder.") from error
    return folder / "report.html"


def render_html(report: EvaluationReport) -> str:
    """The page as one string, with everything it needs inside."""
    present = {origin for sample in report.samples for origin in sample.origins()}
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            lede=_lede(report),
            tiles=_tiles(report),
            origins=[origin for origin in ORIGINS if origin.name in present],
            has_rejected=any(round_.rejected for sample in report.samples for round_ in sample.rounds),
            figures=_inline_figures(report),
            depth=max((len(entry.conditional) for entry in report.acceptance), default=0),
            has_domain_ratio=any(domain.wall_clock_ratio is not None for domain in report.domains),
            decoding_time=_decoding_time(report.timing),
            tables=[*comparison_tables(report), *round_tables(report)],
            facts=_facts(report),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipelines"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(describe=_describe, refused=_refused, visible=_visible, percent=_percent, times=_times)
    return environment


def _figures(report: EvaluationReport) -> dict[str, figures.Figure]:
    drawn = {"acceptance": figures.acceptance_figure(report.acceptance)}
    if report.domains:
        drawn["tau_by_domain"] = figures.tau_figure(report.domains)
        drawn["acceptance_by_domain"] = figures.acceptance_figure([domain.acceptance for domain in report.domains])
    for part in comparisons(report):
        drawn[part.name] = part.draw()
    if report.training:
        drawn["training"] = figures.training_figure(report.training)
    if report.stages:
        drawn["stages"] = figures.stages_figure(report.stages)
    return drawn


@dataclass(frozen=True)
class Comparison:
    """A figure that compares drafters, or what a drafter lets through."""

    name: str
    title: str
    about: str
    draw: Callable[[], figures.Figure]
    wide: bool = False  # several panels side by side


def comparisons(report: EvaluationReport) -> list[Comparison]:
    """Those that this report has the data for."""
    results, drafting = report.drafters, comparison.drafting(report.drafters)
    found = []
    if drafting and (len(drafting) > 1 or len(drafting[0].benchmarks) > 1):
        about = "Pooled over rounds; bars are 95 % intervals over requests."
        found.append(Comparison("benchmarks", "Accepted length by benchmark", about, partial(comparison.benchmark_figure, results)))
    if len(drafting) > 1:
        about = "Accepted given all before were, by draft position."
        draw = partial(comparison.domain_acceptance_figure, results)
        found.append(Comparison("drafters_by_domain", "Acceptance by domain", about, draw, wide=True))
    if comparison.has_depths(results):
        about = "Macro average over benchmarks, 95 % intervals."
        found.append(Comparison("depth", "Accepted length and depth", about, partial(comparison.depth_figure, results)))
    if comparison.has_block_lengths(results):
        about = "Macro average over benchmarks, 95 % intervals; the cost is measured apart, at the stated batch."
        draw = partial(comparison.block_figure, results, report.head_costs)
        found.append(Comparison("block_length", "Accepted length and block length", about, draw, wide=bool(report.head_costs)))
    if report.sweeps:
        about = "Drafts cut before the first slot below the threshold, replayed on rounds in which whole blocks were verified."
        draw = partial(comparison.threshold_figure, report.sweeps)
        found.append(Comparison("thresholds", "Confidence threshold", about, draw, wide=True))
    if report.reliability:
        about = (
            "Survival of the prefix up to each position, predicted by the drafter's confidence and observed, measured by "
            "`python -m pipelines.calibrate` on held-out prompts; on the diagonal they agree."
        )
        draw = partial(comparison.reliability_figure, report.reliability)
        found.append(Comparison("reliability", "Reliability of the confidence", about, draw, wide=True))
    return found


def _inline_figures(report: EvaluationReport) -> dict[str, object]:
    acceptance = []
    for kind, title in figures.KIND_TITLES.items():
        svg = figures.to_svg(figures.acceptance_figure(report.acceptance, (kind,)), f"acceptance-{kind}", f"{title}, by draft position")
        acceptance.append({"title": title, "svg": svg})
    compared = []
    for part in comparisons(report):
        svg = figures.to_svg(part.draw(), f"compared-{part.name}", part.title)
        compared.append({"title": part.title, "about": part.about, "wide": part.wide, "svg": svg})
    drawn: dict[str, object] = {"acceptance": acceptance, "compared": compared, "domains": "", "training": "", "stages": ""}
    if report.domains:
        drawn["domains"] = figures.to_svg(figures.tau_figure(report.domains), "domains-tau", "Accepted length by domain")
    if report.training:
        drawn["training"] = figures.to_svg(
            figures.training_figure(report.training), "training-curve", "Loss and accepted length in training"
        )
    if report.stages:
        drawn["stages"] = figures.to_svg(figures.stages_figure(report.stages), "stage-times", "Wall time of each stage")
    return drawn


def _lede(report: EvaluationReport) -> str:
    ratio = report.timing.ratio
    text = f"Each pass of the target yields {report.tau_pooled.value:.2f} tokens instead of one"
    if ratio is not None:
        word = "faster" if ratio >= 1 else "slower"
        text += f", and the same text comes {max(ratio, 1 / ratio):.2f} times {word} than by plain decoding"
    return f"{text}. {report.prompts:,} {report.prompts_are}, {report.tokens:,} tokens, temperature {report.settings.temperature:g}."


def _tiles(report: EvaluationReport) -> list[Tile]:
    timing, settings = report.timing, report.settings
    first = report.acceptance[0].conditional if report.acceptance else ()
    tiles = [
        Tile("accepted length τ", f"{report.tau_pooled.value:.2f}", f"pooled{_interval(report.tau_pooled)}", main=True),
        Tile("τ per request", f"{report.tau_per_request.value:.2f}", f"mean{_interval(report.tau_per_request)}"),
        Tile("wall clock", _times(timing.ratio), "against plain decoding"),
    ]
    if report.drafters and len(report.drafters[0].benchmarks) > 1:
        macro = report.drafters[0].tau_macro
        tiles[1] = Tile("τ macro", f"{macro.value:.2f}", f"mean over benchmarks{_interval(macro)}")
    if first:
        tiles.append(Tile("first draft token", _percent(first), "accepted by the target"))
    tiles.append(Tile("prompts", f"{report.prompts:,}", f"{report.tokens:,} tokens in {report.rounds:,} rounds"))
    return [*tiles, Tile("temperature", f"{settings.temperature:g}", f"block {settings.block_length}, batch {settings.batch_size}")]


def _facts(report: EvaluationReport) -> list[tuple[str, str]]:
    facts, settings = report.facts, report.settings
    rows = [("target", facts.target), *((f"drafter: {name}", value) for name, value in facts.drafter.items())]
    rows += [
        ("contract", facts.contract_fingerprint),
        (
            "decoding",
            f"at most {settings.max_new_tokens:,} new tokens, batch {settings.batch_size}, {settings.dtype}, seed {settings.seed}",
        ),
        ("machine", facts.machine),
        ("date", facts.date),
        ("git revision", facts.git_revision or "not in a git checkout"),
    ]
    if facts.command:
        rows.append(("command", facts.command))
    if facts.versions:
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())))
    return rows


def _decoding_time(timing: Timing) -> list[tuple[str, str]]:
    if timing.ratio is None:
        return []
    return [
        ("plain", f"{duration(timing.plain_seconds)}, {timing.plain_tokens / timing.plain_seconds:,.0f} tokens/s"),
        ("drafted", f"{duration(timing.drafted_seconds)}, {timing.drafted_tokens / timing.drafted_seconds:,.0f} tokens/s"),
    ]


def _describe(round_: SampleRound, number: int, slot: int) -> str:
    """The line a reader gets for one token."""
    origin = round_.origins()[slot]
    if origin == "target":
        return f"round {number} · target's own, nothing was drafted"
    place = f"draft token {slot + 1} of {round_.drafted}, accepted" if origin == "accepted" else f"target's {origin}"
    text = f"round {number} · {place} · the round accepted {round_.accepted} of {round_.drafted}"
    if origin == "accepted" and round_.confidence:
        text += f" · confidence {round_.confidence[slot]:.2f}"
    return text


def _refused(round_: SampleRound, number: int) -> str:
    """The line a reader gets for a rejected draft token, with those that fell with it."""
    rest = "".join(round_.rejected[1:])
    text = f"round {number} · draft token {round_.accepted + 1} of {round_.drafted}, rejected by the target"
    return f"{text} · with it fell “{rest}”" if rest else text


def _visible(token: str) -> str:
    """Line ends get a sign, so that a token that is only a line end can be seen; other control characters their Unicode pictures."""
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match.group())), token).replace("\n", "↵\n")


def _interval(estimate: Estimate) -> str:
    return "" if estimate.low is None or estimate.high is None else f", {estimate.low:.2f} to {estimate.high:.2f}"


def _percent(ratios: Sequence[Ratio]) -> str:
    return f"{ratios[0].value:.0%}".replace("%", " %") if ratios and ratios[0].trials else "–"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
