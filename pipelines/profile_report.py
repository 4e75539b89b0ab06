"""The page about what a round costs."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from decoding.throughput import WHOLE_ROUNDS, ThroughputTable
from pipelines.figures import MUTED, logarithmic, series_style, styled
from pipelines.page import Page, PageTable, Section, Tile, percent


def profile_page(title: str, table: ThroughputTable, stale: Sequence[str], facts: dict[str, str]) -> Page:
    """Words, figure and table."""
    first, last = table.curves[0], table.curves[-1]
    notes = [f"This table does not hold on this machine. {'; '.join(stale)}."] if stale else []
    if table.kind != "measured":
        notes.append("These figures are assumed, not measured by this project.")
    figure = sps_figure(table)
    return Page(
        kind="cost of a round",
        title=title,
        lede=(
            f"A round of {last.requests} requests takes {1000 * last.seconds[0]:,.0f} ms if nothing but their anchors is verified and "
            f"{1000 * last.seconds[-1]:,.0f} ms with whole blocks of {table.block}. Timed: {table.covers}."
        ),
        tiles=[
            Tile(f"{last.requests} requests", f"{1 / last.seconds[-1]:.2f}", "whole-block rounds a second"),
            Tile(
                f"{first.requests} request{'s' if first.requests > 1 else ''}",
                f"{1 / first.seconds[-1]:.2f}",
                "whole-block rounds a second",
            ),
            Tile("drafting", percent(last.draft_seconds[-1] / last.seconds[-1], 0), f"of a whole-block round at {last.requests} requests")
            if last.draft_seconds[-1]
            else Tile("drafting", "not included", "the target's passes alone"),
            Tile("context", f"{table.context}", "tokens a request"),
        ],
        notes=notes,
        sections=[
            Section(
                "sps",
                "Rounds a second by tokens in the pass",
                f"Timed: {table.covers}. Every mark is a median; between marks the scheduler goes straight. Dashed: no drafter at all.",
                figure,
                "Rounds a second against tokens in the target's pass",
                [_table(table)],
            ),
            *([_drafting(table)] if any(first.draft_seconds) else []),
        ],
        facts=facts,
        picture=figure,
    )


def _drafting(table: ThroughputTable) -> Section:
    return Section(
        "drafting",
        "Drafting by block length",
        "What proposing takes: the first tokens of whole blocks, and blocks made with so many slots only, which is another draft.",
        drafting_figure(table),
        "Milliseconds of drafting against tokens a block, whole blocks cut and blocks made shorter",
    )


@styled
def sps_figure(table: ThroughputTable) -> Figure:
    """Seconds of a round and rounds a second, one line a number of requests."""
    figure = Figure(figsize=(9.6, 3.5))
    speed, seconds = figure.subplots(1, 2)
    for index, curve in enumerate(table.curves):
        style = {**series_style(index), "markersize": 4.5}
        speed.plot(curve.tokens, 1 / np.array(curve.seconds), label=f"{curve.requests}", **style)
        seconds.plot(curve.tokens, 1000 * np.array(curve.seconds), **style)
    counts = [curve.requests for curve in table.curves]
    for axes, values in (
        (speed, [1 / curve.plain_seconds for curve in table.curves]),
        (seconds, [1000 * curve.plain_seconds for curve in table.curves]),
    ):
        axes.plot(counts, values, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
        logarithmic(axes, "x", 2)
        logarithmic(axes, "y", 10)
        axes.set_xlabel("tokens in the target's pass, B")
    what = "rounds" if table.covers == WHOLE_ROUNDS else "passes"
    speed.set(title=f"SPS(B): {what} a second")
    seconds.set(title=f"milliseconds a {what[:-1]}")
    figure.legend(loc="outside right upper", title="requests")
    return figure


@styled
def drafting_figure(table: ThroughputTable) -> Figure:
    """Milliseconds by tokens a block, one colour a number of requests; solid: made that short, dashed: cut from whole blocks."""
    figure = Figure(figsize=(6.4, 3.4))
    axes = figure.subplots()
    at = range(1, table.block + 1)
    for index, curve in enumerate(table.curves):
        style = {**series_style(index), "linestyle": "-"}  # here the line tells something else
        axes.plot(at, [1000 * value for value in curve.block_seconds[1:]], label=f"{curve.requests}", **style)
        axes.plot(at, [1000 * value for value in curve.draft_seconds[1:]], color=style["color"], linestyle=(0, (4, 3)), linewidth=1.2)
    logarithmic(axes, "y", 10)
    axes.set(xlabel="tokens a block", ylabel="ms of drafting", xticks=at, title="solid: made that short; dashed: cut from whole blocks")
    figure.legend(loc="outside right upper", title="requests")
    return figure


def _table(table: ThroughputTable) -> PageTable:
    return PageTable(
        ("requests", "no drafter", "anchors alone", "whole blocks", "drafting 1", f"drafting {table.block}"),
        [
            (
                str(curve.requests),
                *(
                    f"{1000 * value:,.1f} ms"
                    for value in (curve.plain_seconds, curve.seconds[0], curve.seconds[-1], curve.draft_seconds[1], curve.draft_seconds[-1])
                ),
            )
            for curve in table.curves
        ],
    )
