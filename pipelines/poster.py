"""The essence of an evaluation as one picture, for a README: headline numbers, a coloured sample text, acceptance by position, training."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text

from pipelines.figures import MUTED, SERIES, draw_acceptance, draw_losses, draw_tau_teacher_forced, styled
from pipelines.report_data import EvaluationReport
from pipelines.sample_text import Origin, SampleText

WIDTH, HEIGHT = 12.0, 7.7  # inches
PAGE, CARD, LINE = "#f4f6f8", "#ffffff", "#e3e7ec"
FILL: dict[Origin, str] = {"accepted": "#d3e6fb", "bonus": "#bfecd9", "correction": "#ffd9bd", "target": "#e6e8ec"}
EDGE: dict[Origin, str] = {"bonus": SERIES[2], "correction": SERIES[1], "target": SERIES[5]}
NAMES: dict[Origin, str] = {
    "accepted": "drafted, accepted",
    "bonus": "bonus",
    "correction": "correction",
    "target": "undrafted",
}
MONO_SIZE = 11.0  # points
CELL = MONO_SIZE * 0.602 / 72  # width of a character of DejaVu Sans Mono, inches
LEADING = 0.275  # inches


@dataclass(frozen=True)
class Run:
    """Neighbouring characters of one token on one line. `opens` where a verification round begins with it."""

    line: int
    column: int
    text: str
    origin: Origin
    opens: bool


@dataclass(frozen=True)
class Cell:
    """One character, and the token it belongs to."""

    text: str
    token: int
    origin: Origin
    opens: bool


def layout_text(sample: SampleText, columns: int, lines: int) -> tuple[list[Run], int, bool]:
    """Break a sample text into lines at its spaces and line ends.

    Args:
        sample: the text, by rounds and tokens.
        columns: characters a line.
        lines: at most so many lines; what is left over is cut off.

    Returns:
        (runs, number of lines used, whether something was cut off)
    """
    runs: list[Run] = []
    line = column = 0
    opens = False
    for word in _words(_cells(sample)):
        breaks = word[0].text == "\n"
        if breaks or column + len(word) > columns:
            if column:  # empty lines are left out: the picture has little room
                line, column = line + 1, 0
            if breaks or word[0].text == " ":
                opens |= word[0].opens  # the round's bar goes to its first character that is drawn
                continue
        for cell in word:
            if column >= columns:  # a word longer than a line
                line, column = line + 1, 0
            if line >= lines:
                return runs, lines, True
            runs.append(Run(line, column, cell.text, cell.origin, cell.opens or opens))
            opens = False
            column += 1
    return runs, line + bool(column), False


@styled
def poster(report: EvaluationReport) -> Figure:
    """Draw the whole picture; parts without data leave their room to the others."""
    figure = Figure(figsize=(WIDTH, HEIGHT), facecolor=PAGE)
    figure.set_layout_engine("none")  # everything is placed in inches
    _clipped(figure, 0.4, 0.52, WIDTH - 0.8, report.title, fontsize=19, fontweight="bold")
    measured = f"{report.facts.target}  ·  lossless speculative decoding, measured on {report.facts.machine}"
    _clipped(figure, 0.4, 0.86, WIDTH - 0.8, measured, fontsize=11, color=MUTED)
    _headline(figure, report, top=1.12, height=1.02)
    charts = bool(report.acceptance) + bool(report.training)
    left = 6.95 if charts else WIDTH - 0.8
    top, bottom = 2.34, HEIGHT - 0.35
    if report.samples:
        _samples(figure, report.samples, 0.4, top, left - 0.2, bottom - top)
    if charts:
        start = left + 0.4 if report.samples else 0.4
        _charts(figure, report, start, top, WIDTH - 0.4 - start, bottom - top)
    return figure


def _headline(figure: Figure, report: EvaluationReport, top: float, height: float) -> None:
    settings, timing = report.settings, report.timing
    first = report.acceptance[0].conditional if report.acceptance else ()
    tiles = [("accepted length τ", f"{report.tau_pooled.value:.2f}", "tokens per target pass")]
    tiles += [("τ per request", f"{report.tau_per_request.value:.2f}", "mean over prompts")]
    if timing.ratio is not None:
        tiles += [("wall clock", f"{timing.ratio:.2f}×", "against plain decoding")]
    if first and first[0].trials:
        tiles += [("first draft token", f"{first[0].value * 100:.0f} %", "accepted by the target")]
    tiles += [(report.prompts_are, f"{report.prompts:,}", f"temperature {settings.temperature:g}, block {settings.block_length}")]
    gap = 0.16
    width = (WIDTH - 0.8 - gap * (len(tiles) - 1)) / len(tiles)
    for index, (label, value, detail) in enumerate(tiles):
        x = 0.4 + index * (width + gap)
        _card(figure, x, top, width, height, "#e3effc" if not index else CARD)
        _text(figure, x + 0.16, top + 0.27, label, fontsize=10.5, color=MUTED)
        _text(figure, x + 0.16, top + 0.65, value, fontsize=22, fontweight="bold")
        _text(figure, x + 0.16, top + 0.9, detail, fontsize=9.5, color=MUTED)


def _samples(figure: Figure, samples: Sequence[SampleText], x: float, top: float, width: float, height: float) -> None:
    """As many sample texts as there is room for, the last one cut off where it does not fit."""
    _card(figure, x, top, width, height)
    _text(figure, x + 0.2, top + 0.33, "Who wrote which token", fontsize=12.5, fontweight="bold")
    at, end = top + 0.33, top + height - 0.5
    drawn: list[SampleText] = []
    for sample in samples:
        lines = int((end - at - 0.63) / LEADING)
        if lines < (3 if drawn else 1):
            break
        prompt = _printable(" ".join(sample.prompt.split()))
        _clipped(figure, x + 0.2, at + 0.3, width - 0.4, prompt, fontsize=10.5, color=MUTED)
        used = _sample(figure, sample, x + 0.2, at + 0.66, int((width - 0.4) / CELL), lines)
        at += 0.66 + used * LEADING - 0.05
        drawn.append(sample)
    _legend(figure, set().union(*(sample.origins() for sample in drawn)), x + 0.2, top + height - 0.22)


def _sample(figure: Figure, sample: SampleText, x: float, first: float, columns: int, lines: int) -> int:
    """One text, its first baseline at `first`; gives the number of lines it took."""
    runs, used, cut = layout_text(sample, columns, lines)
    for run in runs:
        left, base = x + run.column * CELL, first + run.line * LEADING
        _swatch(figure, run.origin, left, base, CELL)
        if run.opens:
            _box(figure, left - 0.008, base - 0.165, 0.016, 0.237, MUTED)
    for run in runs:
        place = x + (run.column + 0.5) * CELL, first + run.line * LEADING
        _text(figure, *place, run.text, ha="center", family="DejaVu Sans Mono", fontsize=MONO_SIZE)
    if cut:
        last = runs[-1]
        _text(figure, x + (last.column + 1.3) * CELL, first + last.line * LEADING, "…", color=MUTED, fontsize=MONO_SIZE)
    return used


def _legend(figure: Figure, present: set[Origin], x: float, base: float) -> None:
    for origin in NAMES:
        if origin in present:
            _swatch(figure, origin, x, base, 0.24)
            x += 0.31
            x += _width(_text(figure, x, base, NAMES[origin], fontsize=10, color=MUTED)) + 0.22
    _box(figure, x, base - 0.14, 0.016, 0.21, MUTED)
    _text(figure, x + 0.09, base, "new round", fontsize=10, color=MUTED)


def _charts(figure: Figure, report: EvaluationReport, x: float, top: float, width: float, height: float) -> None:
    parts = (["acceptance"] if report.acceptance else []) + (["training"] if report.training else [])
    gap = 0.2
    each = (height - gap * (len(parts) - 1)) / len(parts)
    for index, part in enumerate(parts):
        y = top + index * (each + gap)
        _card(figure, x, y, width, each)
        title = "Acceptance by draft position" if part == "acceptance" else "Training"
        _text(figure, x + 0.2, y + 0.33, title, fontsize=12.5, fontweight="bold")
        right = 0.62 if part == "training" else 0.2
        axes = figure.add_axes(
            (
                (x + 0.7) / WIDTH,
                1 - (y + each - 0.56) / HEIGHT,
                (width - 0.7 - right) / WIDTH,
                (each - 1.1) / HEIGHT,
            )
        )
        if part == "acceptance":
            draw_acceptance(axes, report.acceptance, "conditional")
            axes.set_xlabel("draft position (accepted, given all before were)")
            continue
        draw_losses(axes, report.training, ("loss",))
        axes.yaxis.label.set_color(SERIES[0])
        if any(point.tau_teacher_forced is not None or point.tau_heldout is not None for point in report.training):
            right_axes = axes.twinx()
            draw_tau_teacher_forced(right_axes, report.training)
            right_axes.yaxis.label.set_color(SERIES[2])
            right_axes.grid(False)


def _cells(sample: SampleText) -> list[Cell]:
    cells = [Cell(character, 0, "target", False) for character in _printable(sample.first)]
    token = 1
    for round_ in sample.rounds:
        opens = True
        for text, origin in zip(round_.tokens, round_.origins(), strict=True):
            for character in _printable(text):
                cells.append(Cell(character, token, origin, opens))
                opens = False
            token += 1
    return cells


def _words(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Spaces and line ends stand alone, everything else holds together."""
    words: list[list[Cell]] = []
    for cell in cells:
        if words and cell.text not in " \n" and words[-1][-1].text not in " \n":
            words[-1].append(cell)
        else:
            words.append([cell])
    return words


def _printable(text: str) -> str:
    """What the picture's font can show: tabs as spaces, no control characters, a box for a missing glyph."""
    kept = []
    for character in text.replace("\r\n", "\n").replace("\t", "    "):
        if character == "\n":
            kept.append(character)
        elif unicodedata.category(character)[0] in "CM":
            continue
        else:
            kept.append(character if ord(character) in _glyphs() else "▯")
    return "".join(kept)


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(FT2Font(font_manager.findfont("DejaVu Sans Mono")).get_charmap())


def _text(figure: Figure, x: float, y: float, text: str, **style: Any) -> Text:
    """Text with its baseline at (x, y), inches from the upper left."""
    return figure.text(x / WIDTH, 1 - y / HEIGHT, text, va="baseline", **style)


def _width(text: Text) -> float:
    """Width of a text as drawn, inches."""
    return text.get_window_extent(FigureCanvasAgg(text.figure).get_renderer()).width / text.figure.dpi  # type: ignore[arg-type]


def _clipped(figure: Figure, x: float, y: float, room: float, text: str, **style: Any) -> None:
    """One line of text, shortened until it fits in `room` inches."""
    drawn = _text(figure, x, y, text, **style)
    while text and _width(drawn) > room:
        text = text[: min(len(text) - 1, int(len(text) * room / _width(drawn)))].rstrip()
        drawn.set_text(text + "…")


def _swatch(figure: Figure, origin: Origin, x: float, base: float, width: float) -> None:
    """The ground of a token whose baseline is `base`."""
    _box(figure, x, base - 0.155, width, 0.215, FILL[origin])
    if origin != "accepted":
        _box(figure, x, base + 0.05, width, 0.022, EDGE[origin])


def _box(figure: Figure, x: float, y: float, width: float, height: float, colour: str) -> None:
    place = (x / WIDTH, 1 - (y + height) / HEIGHT)
    figure.add_artist(Rectangle(place, width / WIDTH, height / HEIGHT, facecolor=colour, linewidth=0, transform=figure.transFigure))


def _card(figure: Figure, x: float, y: float, width: float, height: float, colour: str = CARD) -> None:
    # In inches (dpi_scale_trans), so that the corners are round and not elliptic.
    figure.add_artist(
        FancyBboxPatch(
            (x + 0.1, HEIGHT - y - height + 0.1),
            width - 0.2,
            height - 0.2,
            boxstyle="round,pad=0.1,rounding_size=0.1",
            facecolor=colour,
            edgecolor=LINE if colour == CARD else "none",
            linewidth=0.8,
            transform=figure.dpi_scale_trans,
            zorder=0,
        )
    )
