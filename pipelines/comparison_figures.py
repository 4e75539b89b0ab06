"""Figures that compare drafters: acceptance by domain (the paper's Figure 2), accepted length by benchmark, against depth (Figure 3) and
against block length with the sequential head's cost (Figure 4), a sweep of the confidence threshold (Figure 5), and
reliability diagrams (Figure 6).

Each takes data and gives a matplotlib Figure, in the style of `pipelines.figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pipelines.figures import INK, MARKERS, MUTED, SERIES, draw_acceptance, styled
from pipelines.report_data import Acceptance, DrafterResult, Estimate, HeadCost, Kind, Reliability, Sweep

PANELS = 3  # in a row
LABELS = ("as the drafter says", "after scaling")


def drafting(results: Sequence[DrafterResult]) -> list[DrafterResult]:
    """Those that draft at all."""
    return [result for result in results if result.block_length]


@styled
def domain_acceptance_figure(results: Sequence[DrafterResult], kind: Kind = "conditional") -> Figure:
    """Acceptance by draft position, one panel a domain, one line a drafter."""
    domains = list(dict.fromkeys(score.name for result in results for score in result.domains))
    figure, panels = _panels(len(domains), 2.9)
    for panel, domain in zip(panels, domains, strict=False):
        series = [
            Acceptance(result.name, score.acceptance.conditional, score.acceptance.prefix)
            for result in drafting(results)
            for score in result.domains
            if score.name == domain
        ]
        draw_acceptance(panel, series, kind)
        panel.set_title(domain)
    return figure


@styled
def benchmark_figure(results: Sequence[DrafterResult]) -> Figure:
    """Accepted length by benchmark with 95 % intervals, drafters side by side; the macro average below a line."""
    shown = drafting(results)
    names = [score.name for score in shown[0].benchmarks] if shown else []
    labels = [*names, "macro average"]
    figure = Figure(figsize=(4.9, 1.2 + 0.24 * len(labels) * max(1, len(shown))))
    axes = figure.subplots()
    rows = np.arange(len(labels))[::-1]
    step = 0.7 / max(1, len(shown))
    highest = 1.0
    for index, result in enumerate(shown):
        taus = [*(score.tau_pooled for score in result.benchmarks), result.tau_macro]
        at = rows + step * ((len(shown) - 1) / 2 - index)
        colour = SERIES[index % len(SERIES)]
        for place, tau in zip(at, taus, strict=True):
            highest = max(highest, tau.value, tau.high or 0)
            if tau.low is not None and tau.high is not None:
                axes.plot([tau.low, tau.high], [place] * 2, color=colour, linewidth=2, alpha=0.6, solid_capstyle="round")
        axes.plot([tau.value for tau in taus], at, MARKERS[index % len(MARKERS)], color=colour, label=result.name)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    if names:
        axes.axhline(0.5, color=MUTED, linewidth=0.8)
    axes.set(xlabel="accepted length τ (1 = no drafter)", xlim=(0.9, highest * 1.06), ylim=(-0.6, len(labels) - 0.4))
    axes.set_yticks(rows, labels)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if len(shown) > 1:
        figure.legend(loc="outside upper left", ncols=2, handletextpad=0.2, columnspacing=1.4)
    return figure


def has_depths(results: Sequence[DrafterResult]) -> bool:
    """Whether drafters of one kind differ in depth."""
    return bool(_by_depth(results))


def has_block_lengths(results: Sequence[DrafterResult]) -> bool:
    """Whether drafters of one kind differ in block length."""
    return bool(_by_block_length(results))


@styled
def depth_figure(results: Sequence[DrafterResult]) -> Figure:
    """Macro accepted length against the number of drafter layers, one line a kind (and block length) that has several depths."""
    figure = Figure(figsize=(4.9, 3.3))
    axes = figure.subplots()
    _draw(axes, _by_depth(results), lambda result: result.layers)
    axes.set(xlabel="drafter layers", ylabel="accepted length τ, macro")
    figure.legend(loc="outside upper left")
    return figure


@styled
def block_figure(results: Sequence[DrafterResult], costs: Sequence[HeadCost]) -> Figure:
    """Macro accepted length against block length, one line a kind (and depth) that has several; where measured, what the head adds to a
    round.
    """
    overheads = {cost.drafter: 100 * cost.overhead for cost in costs}
    lines = _by_block_length(results)
    figure = Figure(figsize=(4.9 if not overheads else 9.8, 3.3))
    panels = figure.subplots(1, 2 if overheads else 1, squeeze=False)[0]
    _draw(panels[0], lines, lambda result: result.block_length)
    panels[0].set(xlabel="block length (draft tokens)", ylabel="accepted length τ, macro")
    if overheads:
        panels[0].set_title("Accepted length")
        for index, members in enumerate(lines.values()):
            points = [(result.block_length, overheads[result.name]) for result in members if result.name in overheads]
            if points:
                panels[1].plot(*zip(*points, strict=True), color=SERIES[index % len(SERIES)], marker=MARKERS[index % len(MARKERS)])
        ticks = sorted({result.block_length for members in lines.values() for result in members})
        panels[1].set(xlabel="block length (draft tokens)", ylim=(0, None), xticks=ticks)
        panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        panels[1].set_title(f"Sequential head's part of a round, batch {costs[0].batch}")
    figure.legend(loc="outside upper left", ncols=1 if not overheads else 2)
    return figure


@styled
def threshold_figure(sweeps: Sequence[Sweep]) -> Figure:
    """Draft tokens a round that a confidence threshold lets through, accepted and rejected as bars; their acceptance as a line."""
    figure, panels = _panels(len(sweeps), 3.1)
    for panel, sweep in zip(panels, sweeps, strict=False):
        at = np.array([point.threshold for point in sweep.points])
        width = 0.8 * (at[1] - at[0]) if len(at) > 1 else 0.04
        accepted = np.array([point.accepted / max(point.rounds, 1) for point in sweep.points])
        rejected = np.array([point.rejected / max(point.rounds, 1) for point in sweep.points])
        panel.bar(at, accepted, width, color=SERIES[0], label="accepted")
        panel.bar(at, rejected, width, bottom=accepted, color=SERIES[1], alpha=0.75, label="rejected")
        panel.set(xlabel="confidence threshold", ylabel="draft tokens a round")
        panel.set_title(sweep.label)
        rates = panel.twinx()
        rates.plot(at, [100 * point.rate for point in sweep.points], color=SERIES[2], marker=".", label="of them accepted")
        rates.set_ylim(0, 100)
        rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
        rates.grid(False)
        rates.tick_params(axis="y", labelcolor=SERIES[2])
        if panel is panels[0]:
            handles = [*panel.get_legend_handles_labels()[0], *rates.get_legend_handles_labels()[0]]
            figure.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=1.4, columnspacing=1.4)
    return figure


@styled
def reliability_figure(diagrams: Sequence[Reliability]) -> Figure:
    """Observed against predicted survival, one panel a diagram (the paper's figure 6); the size of a mark follows its number of rounds."""
    columns = min(len(diagrams), 4)
    rows = -(-len(diagrams) // columns)
    figure = Figure(figsize=(2.45 * columns, 2.5 * rows + 0.3))
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for spare in panels[len(diagrams) :]:
        spare.set_visible(False)
    for k, (panel, diagram) in enumerate(zip(panels, diagrams, strict=False)):
        panel.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for index, bins in enumerate((diagram.before, diagram.after)):
            if not bins:
                continue
            predicted, observed = [one.predicted for one in bins], [one.observed for one in bins]
            colour, most = SERIES[1 - index], max(one.rounds for one in bins)  # vermilion before, blue after
            panel.plot(predicted, observed, color=colour, linewidth=1.4, alpha=0.8, label=LABELS[index])
            sizes = [6 + 70 * one.rounds / most for one in bins]
            panel.scatter(predicted, observed, s=sizes, color=colour, alpha=0.55, linewidths=0, marker=MARKERS[index])
        panel.set(title=diagram.label, xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        if k % columns == 0:
            panel.set_ylabel("observed")
        if k // columns == rows - 1:
            panel.set_xlabel("predicted")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2)
    return figure


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    columns = max(1, min(PANELS, count))
    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(3.4 * columns + 0.4, height * rows + 0.2))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels


Lines = dict[str, list[DrafterResult]]


def _by_depth(results: Sequence[DrafterResult]) -> Lines:
    return _lines(results, lambda result: (result.kind, result.block_length), lambda result: result.layers, "blocks of {}")


def _by_block_length(results: Sequence[DrafterResult]) -> Lines:
    return _lines(results, lambda result: (result.kind, result.layers), lambda result: result.block_length, "{} layers")


def _lines(
    results: Sequence[DrafterResult], line: Callable[[DrafterResult], tuple[str, int]], x: Callable[[DrafterResult], int], other: str
) -> Lines:
    """Drafters by `line`, those lines alone where x differs, in its order. A name says the second part where a kind has several lines."""
    groups: dict[tuple[str, int], list[DrafterResult]] = {}
    for result in drafting(results):
        groups.setdefault(line(result), []).append(result)
    groups = {key: sorted(members, key=x) for key, members in groups.items() if len({x(member) for member in members}) > 1}
    kinds = [kind for kind, _ in groups]
    return {kind if kinds.count(kind) == 1 else f"{kind}, {other.format(fixed)}": members for (kind, fixed), members in groups.items()}


def _draw(axes: Axes, lines: Lines, x: Callable[[DrafterResult], int]) -> None:
    for index, (name, members) in enumerate(lines.items()):
        taus = [result.tau_macro for result in members]
        axes.errorbar(
            [x(result) for result in members],
            [tau.value for tau in taus],
            yerr=np.array([_reach(tau) for tau in taus]).T,
            color=SERIES[index % len(SERIES)],
            marker=MARKERS[index % len(MARKERS)],
            capsize=3,
            elinewidth=1.2,
            label=name,
        )
    axes.set_xticks(sorted({x(result) for members in lines.values() for result in members}))
    axes.set_ylim(bottom=1)


def _reach(tau: Estimate) -> tuple[float, float]:
    return max(0.0, tau.value - (tau.low if tau.low is not None else tau.value)), max(
        0.0, (tau.high if tau.high is not None else tau.value) - tau.value
    )
