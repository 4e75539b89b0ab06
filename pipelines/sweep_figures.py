"""Figures of a sweep: heat maps over two fields, learning curves, acceptance by draft position, parallel coordinates."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from pipelines.figures import GRID, INK, MARKERS, MUTED, SERIES, styled
from pipelines.sweep_config import Value
from pipelines.sweep_trials import Result

Measure = Callable[[Result], float | None]
_SCALE = LinearSegmentedColormap.from_list("sweep", ["#dcebfa", "#2f7fd1", "#0d2f57"])
_MOST_CELLS = 16  # along one side of a heat map
_MOST_CURVES = len(SERIES)


def shown(value: Value) -> str:
    """A field's value as people write it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def axes_of(results: Sequence[Result]) -> tuple[str, ...]:
    """The one or two fields to draw heat maps over: those with the most values that still fit; none where no field varies so."""
    counts = {path: len({result.trial.values[path] for result in results}) for path in (results[0].trial.values if results else ())}
    fitting = [path for path, count in counts.items() if 1 < count <= _MOST_CELLS]
    return tuple(sorted(sorted(fitting, key=lambda path: -counts[path])[:2], key=list(counts).index))


@styled
def heat_map(results: Sequence[Result], measure: Measure, title: str, form: str = "{:.2f}") -> Figure:
    """The measure over two fields (one: a single row); the best of the others' values where there are more fields."""
    paths = axes_of(results)
    across, down = paths[-1], paths[0] if len(paths) > 1 else None
    columns = _ordered({result.trial.values[across] for result in results})
    rows = _ordered({result.trial.values[down] for result in results}) if down else [None]
    cells: dict[tuple[int, int], list[float]] = {}
    for result in results:
        value = measure(result)
        place = (rows.index(result.trial.values[down]) if down else 0, columns.index(result.trial.values[across]))
        cells.setdefault(place, []).extend([] if value is None else [value])
    figure = Figure(figsize=(4.9, 1.35 + 0.46 * max(len(rows), 2)))
    axes = figure.subplots()
    values = [max(found) for found in cells.values() if found]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    for row in range(len(rows)):
        for column in range(len(columns)):
            found = cells.get((row, column))
            best = max(found) if found else None
            _cell(axes, column, row, best, low, high, form, best is not None and best == high)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=across, ylabel=down or "")
    axes.set_xticks(range(len(columns)), [shown(value) for value in columns])
    axes.set_yticks(range(len(rows)) if down else [], [shown(value) for value in rows] if down else [])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title)
    return figure


def _cell(axes: Axes, column: int, row: int, value: float | None, low: float, high: float, form: str, best: bool) -> None:
    if value is None:
        axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, fill=False, edgecolor=GRID, linewidth=1))
        axes.text(column, row, "–", ha="center", va="center", color=MUTED)
        return
    share = (value - low) / (high - low) if high > low else 0.5
    axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, facecolor=_SCALE(share), edgecolor="none"))
    # Colours of their own, not the page's: they stand on the cell, in either theme.
    ink = "#ffffff" if share > 0.42 else "#1b2331"
    axes.text(column, row, form.format(value), ha="center", va="center", color=ink, fontweight="bold" if best else "normal")


@styled
def learning_figure(results: Sequence[Result], objective: str) -> Figure:
    """Held-out tau by step: the best trials in colour, all others faintly."""
    figure = Figure(figsize=(4.9, 3.5))
    axes = figure.subplots()
    ranked = _ranked(results, objective)
    for result in ranked[_MOST_CURVES:]:
        axes.plot(*_curve(result), color=MUTED, linewidth=0.9, alpha=0.45)
    for index, result in enumerate(ranked[:_MOST_CURVES]):
        style: dict[str, Any] = {"color": SERIES[index], "marker": MARKERS[index], "markersize": 4.5, "linewidth": 1.6}
        axes.plot(*_curve(result), label=result.trial.name, **style)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel="optimizer step", ylabel="held-out τ")
    axes.margins(x=0.03)
    if ranked:
        figure.legend(loc="outside lower center", ncols=1 if _long(ranked) else 2, handlelength=1.6, columnspacing=1.2)
    return figure


@styled
def acceptance_by_position(results: Sequence[Result], objective: str) -> Figure:
    """one_minus_tv@k of the best trials, teacher-forced on the held-out rows."""
    figure = Figure(figsize=(4.9, 3.5))
    axes = figure.subplots()
    ranked = [result for result in _ranked(results, objective) if result.acceptance][:_MOST_CURVES]
    depth = max((len(result.acceptance) for result in ranked), default=1)
    for index, result in enumerate(ranked):
        at = range(1, len(result.acceptance) + 1)
        style: dict[str, Any] = {"color": SERIES[index], "marker": MARKERS[index], "markersize": 4.5, "linewidth": 1.6}
        axes.plot(at, result.acceptance, label=result.trial.name, **style)
    axes.set(xlabel="draft position k", ylabel="one_minus_tv@k", xlim=(0.7, depth + 0.3), ylim=(0, None))
    axes.set_xticks(range(1, depth + 1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    if ranked:
        figure.legend(loc="outside lower center", ncols=1 if _long(ranked) else 2, handlelength=1.6, columnspacing=1.2)
    return figure


@styled
def parallel_coordinates(results: Sequence[Result], measures: dict[str, Measure], objective: str) -> Figure:
    """A line a trial through its values and what came of them, coloured by the objective."""
    ranked = _ranked(results, objective)[::-1]  # the best on top
    paths = [path for path in (ranked[0].trial.values if ranked else ()) if len({result.trial.values[path] for result in ranked}) > 1]
    columns = [(path.rpartition(".")[2], *_placed([result.trial.values[path] for result in ranked])) for path in paths]
    for name, measure in measures.items():
        values = [measure(result) for result in ranked]
        if all(value is not None for value in values):
            columns.append((name, *_placed(values, as_numbers=True)))
    figure = Figure(figsize=(9.6, 3.2))
    axes = figure.subplots()
    goals = [result.objective(objective) or 0.0 for result in ranked]
    low, high = (min(goals), max(goals)) if goals else (0.0, 1.0)
    for index, goal in enumerate(goals):
        share = (goal - low) / (high - low) if high > low else 0.5
        line = [heights[index] for _, heights, _ in columns]
        axes.plot(range(len(line)), line, color=SERIES[0], alpha=0.15 + 0.85 * share, linewidth=0.8 + 1.6 * share)
    for at, (_, _, ticks) in enumerate(columns):
        axes.axvline(at, color=MUTED, linewidth=0.8)
        for height, text in ticks:
            axes.annotate(text, (at, height), xytext=(4, 0), textcoords="offset points", va="center", color=INK, fontsize=8.5)
    axes.set_xticks(range(len(columns)), [name for name, _, _ in columns])
    axes.set(yticks=[], xlim=(-0.1, max(len(columns) - 0.5, 0.5)), ylim=(-0.06, 1.06))
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _placed(values: Sequence[Value], as_numbers: bool = False) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights from 0 to 1 and what to write at them: evenly spaced values, or in proportion where there are many."""
    distinct = _ordered(set(values))
    if as_numbers or len(distinct) > 8:
        low, high = float(min(values)), float(max(values))
        heights = [(float(value) - low) / (high - low) if high > low else 0.5 for value in values]
        return heights, [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")] if high > low else [(0.5, f"{low:.4g}")]
    place = {value: index / max(len(distinct) - 1, 1) for index, value in enumerate(distinct)}
    return [place[value] for value in values], [(height, shown(value)) for value, height in place.items()]


def _ordered(values: set[Value]) -> list[Value]:
    """Numbers by size, others by their text."""
    numbers = all(isinstance(value, int | float) for value in values)
    return sorted(values) if numbers else sorted(values, key=shown)


def _ranked(results: Sequence[Result], objective: str) -> list[Result]:
    """Scored trials, the best first."""
    scored = [result for result in results if result.objective(objective) is not None]
    return sorted(scored, key=lambda result: -(result.objective(objective) or 0.0))


def _curve(result: Result) -> tuple[np.ndarray, np.ndarray]:
    scores = np.array(result.record.scores, dtype=float).reshape(-1, 2)
    return scores[:, 0], scores[:, 1]


def _long(results: Sequence[Result]) -> bool:
    return max(len(result.trial.name) for result in results) > 28
