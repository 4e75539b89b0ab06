"""Figures of training and evaluation: each function takes data and gives a matplotlib Figure.

`save` and `to_svg` turn a figure into a file or a part of a page. Drawn without pyplot, so nothing global is left behind.
The series colours read on white and on near-black alike and stay apart for colour-blind readers; markers differ as well.
Text, axes and grid have colours of their own, which `to_svg` replaces by the page's, so that one SVG fits both themes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from pipelines.report_data import Acceptance, DomainResult, Kind, StageTime, TrainingPoint

SERIES = ("#2f7fd1", "#d8652b", "#12987a", "#a767b8", "#8a8320", "#7c8694")  # blue, vermilion, green, purple, olive, grey
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHED = (0, (4, 2))
INK, MUTED, GRID = "#1b2330", "#5b6675", "#dde2e8"
THEMED = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)"}  # what to_svg replaces

_SCORINGS = 4  # drawn of a run, however many there were
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a label with dollar signs is a label
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text: selectable, in the page's own font
}

KIND_TITLES: dict[Kind, str] = {"conditional": "Accepted, given all before were", "prefix": "Prefix still standing"}
TERM_NAMES = {
    "loss": "loss",
    "ce": "cross-entropy",
    "tv": "total variation",
    "confidence_bce": "confidence",
    "soft_ce": "soft cross-entropy",
    "lk": "LK",
    "lk_hybrid": "LK hybrid",
}

P = ParamSpec("P")


@contextmanager
def _style(name: str = "figure") -> Iterator[None]:
    """STYLE in force, and SVG ids that depend on `name` and the content only, so that the same data gives the same file."""
    with mpl.rc_context():
        mpl.rcParams.update(STYLE)
        mpl.rcParams["svg.hashsalt"] = name
        yield


def series_style(index: int) -> dict[str, Any]:
    """Colour, marker and line of a figure's series by its number: after six of them, dashed."""
    row, place = divmod(index, len(SERIES))
    return {"color": SERIES[place], "marker": MARKERS[place], "linestyle": ("-", DASHED)[row % 2]}


def logarithmic(axes: Axes, name: str, base: int) -> None:
    """Make axis `name`, x or y, logarithmic, with plain numbers: powers would be mathematics, which STYLE leaves alone."""
    getattr(axes, f"set_{name}scale")("log", base=base)
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(NullFormatter())


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Run a drawing function under STYLE, leaving matplotlib's global settings alone."""

    @wraps(draw)
    def under_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return under_style


@styled
def acceptance_figure(series: Sequence[Acceptance], kinds: Sequence[Kind] = ("conditional", "prefix")) -> Figure:
    """Acceptance by draft position, one panel a kind, one line a drafter, 95 % Wilson bands (the paper's Figure 2)."""
    figure = Figure(figsize=(4.9 * len(kinds), 3.3))
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        draw_acceptance(panel, series, kind)
        if len(kinds) > 1:
            panel.set_title(KIND_TITLES[kind])
    return figure


def draw_acceptance(axes: Axes, series: Sequence[Acceptance], kind: Kind) -> None:
    """One panel of `acceptance_figure`, to be placed in any figure."""
    depth = 1
    for index, entry in enumerate(series):
        ratios = entry.of(kind)
        depth = max(depth, len(ratios))
        at = np.arange(1, len(ratios) + 1)
        band = np.array([ratio.interval() for ratio in ratios]).reshape(-1, 2)
        colour = SERIES[index % len(SERIES)]
        axes.fill_between(at, band[:, 0], band[:, 1], color=colour, alpha=0.16, linewidth=0)
        axes.plot(at, [ratio.value for ratio in ratios], color=colour, marker=MARKERS[index % len(MARKERS)], label=entry.label)
    axes.set(xlabel="draft position", ylim=(0, 1), xlim=(0.7, depth + 0.3), xticks=range(1, depth + 1))
    axes.set_yticks(np.linspace(0, 1, 6), [f"{value:.0f} %" for value in np.linspace(0, 100, 6)])
    if len(series) > 1:
        axes.legend(loc="best", handlelength=1.6)


@styled
def training_figure(points: Sequence[TrainingPoint]) -> Figure:
    """Loss terms (above) and teacher-forced accepted length (below) against optimizer steps, samples on the upper scale."""
    figure = Figure(figsize=(4.9, 4.4))
    losses, tau = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    draw_losses(losses, points)
    draw_tau_teacher_forced(tau, points)
    losses.set_xlabel("")
    add_sample_scale(losses, points)
    return figure


@styled
def heldout_figure(points: Sequence[TrainingPoint]) -> Figure:
    """Held-out rows: one_minus_tv by position at some scorings, the last one among them; where there is one, the confidence head's bias."""
    scored = [point for point in points if point.positions]
    biases = [(point.step, point.confidence_bias) for point in points if point.confidence_bias is not None]
    figure = Figure(figsize=(4.9, 4.4 if biases else 2.9))
    heights = (1.7, 1) if biases else (1,)
    upper, *lower = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    chosen = np.linspace(0, len(scored) - 1, min(len(scored), _SCORINGS)).round().astype(int)
    for marker, colour, point in zip(MARKERS, SERIES, (scored[number] for number in chosen), strict=False):
        upper.plot(range(1, len(point.positions) + 1), point.positions, marker=marker, color=colour, label=f"step {point.step:,}")
    upper.set(xlabel="draft position k", ylabel="one_minus_tv@k", ylim=(0, None))
    upper.xaxis.set_major_locator(MaxNLocator(integer=True))
    if scored:
        upper.legend(ncols=2, handlelength=1.6)
    for axes in lower:
        axes.plot(*zip(*biases, strict=True), marker=MARKERS[0], color=SERIES[0])
        axes.axhline(0, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlabel="optimizer step", ylabel="confidence bias")
    return figure


def draw_losses(axes: Axes, points: Sequence[TrainingPoint], terms: Sequence[str] = tuple(TERM_NAMES)) -> None:
    """The given loss terms as far as the log has them, raw faintly and smoothed strongly."""
    names = [name for name in terms if any(name in point.terms for point in points)]
    for index, name in enumerate(names):
        have = [(point.step, point.terms[name]) for point in points if name in point.terms]
        _smoothed_line(axes, have, SERIES[index % len(SERIES)], TERM_NAMES[name])
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.set_ylim(bottom=0)
    if len(names) > 1:
        axes.legend(loc="upper right", ncols=2, handlelength=1.2, columnspacing=1.2, borderaxespad=0.1)


def draw_tau_teacher_forced(axes: Axes, points: Sequence[TrainingPoint]) -> None:
    """Teacher-forced accepted length, in training as a line and on held-out rows as points, and there decoded; 1 is no drafter at all."""
    trained = [(point.step, point.tau_teacher_forced) for point in points if point.tau_teacher_forced is not None]
    _smoothed_line(axes, trained, SERIES[2], "training")
    heldout = [(point.step, point.tau_heldout) for point in points if point.tau_heldout is not None]
    decoded = [(point.step, point.tau_decoded) for point in points if point.tau_decoded is not None]
    for index, (label, have) in enumerate((("held out", heldout), ("held out, decoded", decoded)), start=3):
        if have:
            axes.plot(*zip(*have, strict=True), "--", marker=MARKERS[index], color=SERIES[index], linewidth=1.4, label=label)
    if heldout and (trained or decoded):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.1), handlelength=1.6, borderaxespad=0.1)
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel="optimizer step", ylabel="τ" if decoded else "teacher-forced τ")


def add_sample_scale(axes: Axes, points: Sequence[TrainingPoint]) -> None:
    """A second scale above that counts training samples, where the log has them in proportion to its steps."""
    last = next((point for point in reversed(points) if point.samples and point.step), None)
    if last is None:
        return
    per_step = last.samples / last.step
    upper = axes.secondary_xaxis("top", functions=(lambda step: np.asarray(step) * per_step, lambda count: np.asarray(count) / per_step))
    upper.set_xlabel("training samples", color=MUTED)
    upper.spines["top"].set_visible(False)
    upper.xaxis.set_major_locator(MaxNLocator(5))


@styled
def tau_figure(domains: Sequence[DomainResult]) -> Figure:
    """Accepted length by domain with 95 % intervals: pooled over rounds, and averaged over requests."""
    figure = Figure(figsize=(4.9, 1.15 + 0.55 * max(1, len(domains))))
    axes = figure.subplots()
    rows = np.arange(len(domains))[::-1]
    highest = 1.0
    for index, (label, offset) in enumerate((("pooled over rounds", 0.12), ("mean over requests", -0.12))):
        for row, domain in zip(rows, domains, strict=True):
            tau = domain.tau_per_request if index else domain.tau_pooled
            highest = max(highest, tau.value, tau.high or 0)
            if tau.low is not None and tau.high is not None:
                axes.plot([tau.low, tau.high], [row + offset] * 2, color=SERIES[index], linewidth=2.2, alpha=0.6, solid_capstyle="round")
            axes.plot(tau.value, row + offset, MARKERS[index], color=SERIES[index], markersize=6.5, label=label if row == rows[0] else None)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel="accepted length τ (1 = no drafter)", xlim=(0.9, highest * 1.06), ylim=(-0.6, len(domains) - 0.4))
    axes.set_yticks(rows, [domain.domain for domain in domains])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if domains:
        figure.legend(loc="outside upper left", ncols=2, handletextpad=0.2, columnspacing=1.4)
    return figure


@styled
def stages_figure(stages: Sequence[StageTime]) -> Figure:
    """Wall time of each stage as bars, in the order they ran."""
    figure = Figure(figsize=(4.9, 0.75 + 0.4 * max(1, len(stages))))
    axes = figure.subplots()
    rows = np.arange(len(stages))[::-1]
    seconds = [stage.seconds for stage in stages]
    colours = [SERIES[5] if stage.skipped else SERIES[0] for stage in stages]
    axes.barh(rows, seconds, height=0.56, color=colours)
    for row, stage in zip(rows, stages, strict=True):
        text = "unchanged: skipped" if stage.skipped else duration(stage.seconds)
        axes.annotate(text, (stage.seconds, row), xytext=(5, 0), textcoords="offset points", va="center", color=MUTED, fontsize=9)
    axes.set_yticks(rows, [stage.stage for stage in stages])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set(xticks=[], xlim=(0, max([*seconds, 1e-9]) * 1.25), ylim=(-0.6, len(stages) - 0.4))
    for spine in ("left", "bottom"):
        axes.spines[spine].set_visible(False)
    axes.grid(False)
    total = sum(seconds)
    axes.set_title(f"{duration(total)} in all", fontweight="normal", fontsize=9.5, color=MUTED, pad=4)
    return figure


def duration(seconds: float) -> str:
    """A wall time as people say it: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def save(figure: Figure, path: Path, dpi: int = 160, ground: str | None = "white") -> Path:
    """Write a figure as PNG or SVG, by the path's suffix, on a ground colour (None: the figure's own)."""
    with _style():
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=dpi, facecolor=ground or figure.get_facecolor(), metadata=metadata)
    return path


def to_svg(figure: Figure, name: str, description: str) -> str:
    """A figure as an SVG element for an HTML page: transparent, text and axes in the page's colours, its ids starting with `name`.

    Everything in it that came from data has been escaped by matplotlib; `description` (a screen reader's text) must not hold markup.
    """
    buffer = io.StringIO()
    with _style(name):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="', f' id="{name}-', svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{description}">', svg, count=1)
    for colour, themed in THEMED.items():
        svg = svg.replace(colour, themed)
    return svg.strip()


def _smoothed_line(axes: Axes, have: Sequence[tuple[int, float]], colour: str, label: str) -> None:
    """A line; where it has many points, the raw ones faintly behind a centred moving mean."""
    if not have:
        return
    steps, values = np.array([step for step, _ in have]), np.array([value for _, value in have], dtype=np.float64)
    reach = len(values) // 40  # window of 2 * reach + 1 points: a twentieth of the curve
    if reach:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
        values = np.array([values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))])
    axes.plot(steps, values, color=colour, label=label)
