"""The page about serving: throughput against speed for a user, tokens verified against load, service levels, doubts, validation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from decoding.simulator import Served
from pipelines.figures import logarithmic, series_style, styled
from pipelines.page import Page, PageTable, Section, Tile, percent
from pipelines.validation import Comparison, Validation


@dataclass(frozen=True)
class Point:
    """One schedule at one concurrency, simulated: tokens a second of a replica and of a request, tokens verified, share wasted."""

    name: str
    concurrency: int
    throughput: float
    user_speed: float
    budget: float
    waste: float


@dataclass(frozen=True)
class SimulationFindings:
    """What the page is made of. `kind` says whether the cost table was measured or assumed."""

    title: str
    kind: str
    points: Sequence[Point]
    sla: Sequence[float]
    load: dict[str, Served]
    load_steps: Sequence[tuple[float, float]]
    replicas: int
    doubts: Sequence[dict[str, Any]]
    validations: Sequence[Validation]
    comparisons: Sequence[Comparison]
    notes: Sequence[str]
    facts: dict[str, str]


def simulation_page(found: SimulationFindings) -> Page:
    """Words, figures and tables."""
    most = max(point.concurrency for point in found.points)
    best = max((point for point in found.points if point.concurrency == most), key=lambda point: point.throughput)
    source = f"Simulated from recorded rounds; the cost table is {found.kind}."
    sections = [
        Section(
            "pareto",
            "Throughput against speed for a user",
            f"{source} Each mark is a concurrency that is kept; up and to the right is better.",
            pareto_figure(found),
            "Throughput of a replica against tokens a second of a user, one line a schedule",
        ),
        Section(
            "budget",
            "Tokens verified against load",
            f"{source} Tokens of a request in a pass, its anchor included.",
            budget_figure(found),
            "Tokens verified a round against concurrency, one line a schedule",
        ),
        Section(
            "sla",
            "Service levels",
            f"{source} Highest throughput of a replica (tokens a second) at which a user still gets so many tokens a second.",
            tables=[sla_table(found)],
        ),
        Section(
            "load",
            "Changing load",
            f"{source} {found.replicas} replicas; requests arrive at random, in turn at "
            + ", ".join(percent(share, 0) for share, _ in found.load_steps)
            + f" of the highest throughput above, {found.load_steps[0][1]:g} s each.",
            tables=[_load_table(found)],
        ),
    ]
    if found.doubts:
        sections.append(
            Section(
                "doubts",
                "Where confidences or costs are wrong",
                f"{source} Throughput of algorithm 1 that believes what stands at the left, by concurrency.",
                tables=[_doubt_table(found.doubts)],
            )
        )
    if found.validations:
        sections.append(
            Section(
                "validation",
                "On the real decoder",
                "Measured: held-out prompts in batches that start together, without prefill, schedules in turn forwards and backwards, "
                "with other texts; bars and ranges go from the slowest run to the fastest. Predicted: the simulator on recorded answers.",
                measured_figure(found),
                "Measured throughput, speed of a user and tokens verified against concurrency, one line a schedule",
                [_comparison_table(found.comparisons), _validation_table(found.validations)],
            )
        )
    return Page(
        kind="serving",
        title=found.title,
        lede=f"At {most} requests {best.name} serves the most: {best.throughput:,.1f} tokens a second on a replica. {source}",
        tiles=[
            Tile(f"best at {most} requests", f"{best.throughput:,.1f}", f"tokens/s, {best.name}"),
            Tile(
                "schedules",
                str(len({point.name for point in found.points})),
                f"at {len({p.concurrency for p in found.points})} concurrencies",
            ),
            Tile("cost table", found.kind, "per round, drafting included"),
            *_error_tile(found.validations),
        ],
        sections=sections,
        facts=found.facts,
        picture=pareto_figure(found),
        notes=found.notes,
    )


def _error_tile(validations: Sequence[Validation]) -> list[Tile]:
    if not validations:
        return []
    errors = [abs(one.error) for one in validations]
    return [Tile("prediction error", percent(float(np.mean(errors)), 0), f"mean of {len(errors)}, at most {percent(max(errors), 0)}")]


def _styles(found: SimulationFindings) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(point.name for point in found.points))
    return {name: {**series_style(index), "linewidth": 1.5, "markersize": 5, "label": name} for index, name in enumerate(names)}


@styled
def pareto_figure(found: SimulationFindings) -> Figure:
    """The paper's figure 7."""
    figure = Figure(figsize=(8.6, 4.2))
    axes = figure.subplots()
    for name, style in _styles(found).items():
        own = [point for point in found.points if point.name == name]
        axes.plot([point.user_speed for point in own], [point.throughput for point in own], **style)
    axes.set(xlabel="tokens a second of a user", ylabel="tokens a second of a replica")
    axes.set_title(f"simulated; cost table {found.kind}", fontweight="normal", fontsize=9.5)
    figure.legend(loc="outside right upper")
    return figure


@styled
def budget_figure(found: SimulationFindings) -> Figure:
    """The paper's figure 8."""
    figure = Figure(figsize=(8.6, 3.5))
    axes = figure.subplots()
    for name, style in _styles(found).items():
        own = [point for point in found.points if point.name == name]
        axes.plot([point.concurrency for point in own], [point.budget for point in own], **style)
    logarithmic(axes, "x", 2)
    axes.set(xlabel="requests held", ylabel="tokens verified a round")
    axes.set_ylim(bottom=0.8)
    axes.set_title(f"simulated; cost table {found.kind}", fontweight="normal", fontsize=9.5)
    figure.legend(loc="outside right upper")
    return figure


@styled
def measured_figure(found: SimulationFindings) -> Figure:
    """Throughput and budget against concurrency, throughput against a user's speed; measured."""
    figure = Figure(figsize=(11.4, 4.0))
    throughput, pareto, budget = figure.subplots(1, 3)
    for name, style in _styles(found).items():
        own = [one for one in found.validations if one.name == name and one.concurrency]
        at, tokens = [one.concurrency for one in own], [one.measured for one in own]
        reach = [[one.measured - one.low for one in own], [one.high - one.measured for one in own]]
        throughput.errorbar(at, tokens, yerr=reach, elinewidth=0.9, capsize=2, **style)
        pareto.plot([one.user_speed for one in own], tokens, **style)
        budget.plot(at, [one.budget for one in own], **style)
    for axes in (throughput, budget):
        logarithmic(axes, "x", 2)
        axes.set_xlabel("requests that start together")
    throughput.set(ylabel="tokens a second")
    logarithmic(throughput, "y", 2)
    pareto.set(xlabel="tokens a second of a user", ylabel="tokens a second")
    budget.set(ylabel="tokens verified a round")
    budget.set_ylim(bottom=0.8)
    handles, labels = throughput.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=5)
    return figure


def sla_table(found: SimulationFindings) -> PageTable:
    """Highest throughput at which a user's speed reaches each level, among the concurrencies simulated."""
    rows = []
    for name in dict.fromkeys(point.name for point in found.points):
        cells = [name]
        for level in found.sla:
            reached = [point.throughput for point in found.points if point.name == name and point.user_speed >= level]
            cells.append(f"{max(reached):,.1f}" if reached else "–")
        rows.append(cells)
    return PageTable(["schedule", *(f"≥ {level:g} tokens/s" for level in found.sla)], rows)


def _load_table(found: SimulationFindings) -> PageTable:
    return PageTable(
        ("schedule", "tokens/s a replica", "user, mean", "user, slowest tenth", "wait, mean", "verified a round", "wasted"),
        [
            (
                name,
                f"{served.throughput:,.1f}",
                f"{served.user_speed:.1f}",
                f"{np.quantile(served.speeds, 0.1):.1f}" if served.speeds else "–",
                f"{np.mean(served.waits):.1f} s" if served.waits else "–",
                f"{served.budget:.2f}",
                percent(served.waste, 0),
            )
            for name, served in found.load.items()
        ],
    )


def _doubt_table(doubts: Sequence[dict[str, Any]]) -> PageTable:
    counts = sorted({one["concurrency"] for one in doubts})
    value = {(one["case"], one["concurrency"]): one["throughput"] for one in doubts}
    cases = dict.fromkeys(one["case"] for one in doubts)
    return PageTable(["believed", *map(str, counts)], [[case, *(f"{value[case, count]:,.1f}" for count in counts)] for case in cases])


def _comparison_table(compared: Sequence[Comparison]) -> PageTable:
    names = list(dict.fromkeys(name for one in compared for name in one.over_best_fixed))
    return PageTable(
        ("requests", "best fixed schedule", "tokens/s", *names),
        [(one.load, one.best_fixed, f"{one.measured:,.1f}", *(f"{one.over_best_fixed[name]:+.1%}" for name in names)) for one in compared],
        "Hardware-aware schedules against the best of the fixed ones; several requests in a row are a load that changes.",
    )


def _validation_table(validations: Sequence[Validation]) -> PageTable:
    return PageTable(
        (
            "schedule",
            "requests",
            "tokens/s",
            "range",
            "predicted",
            "error",
            "user",
            "slowest tenth",
            "user predicted",
            "τ",
            "τ predicted",
            "verified a round",
            "wasted",
            "scheduler",
        ),
        [
            (
                one.name,
                one.load,
                f"{one.measured:,.1f}",
                f"{one.low:,.1f} to {one.high:,.1f}",
                f"{one.predicted:,.1f}",
                f"{one.error:+.0%}",
                f"{one.user_speed:.1f}",
                f"{one.slowest_tenth:.1f}",
                f"{one.predicted_user_speed:.1f}",
                f"{one.tau:.2f}",
                f"{one.predicted_tau:.2f}",
                f"{one.budget:.2f}",
                percent(one.waste, 0),
                percent(one.scheduler_share, 2),
            )
            for one in validations
        ],
        "user: tokens a second of a request while it was there. verified a round: a request's tokens in a pass, its anchor included.",
    )
