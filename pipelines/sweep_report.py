"""The dashboard of a sweep: one page without outside resources, refreshed while trials run, and its figures as files."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pipelines import figures
from pipelines.figures import duration
from pipelines.page import Tile, publish
from pipelines.plain_data import ReportError
from pipelines.sweep_figures import acceptance_by_position, axes_of, heat_map, learning_figure, parallel_coordinates, shown
from pipelines.sweep_trials import Result, SweepFacts, best_of


@dataclass(frozen=True)
class Cell:
    """What is shown, and what it is sorted by (empty: always last)."""

    text: str
    value: str


@dataclass(frozen=True)
class Column:
    name: str
    number: bool


@dataclass(frozen=True)
class Row:
    name: str
    outcome: str
    best: bool
    cells: Sequence[Cell]
    command: str


@dataclass(frozen=True)
class Failure:
    name: str
    outcome: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Drawing:
    """A figure with its words; `name` is its anchor and its file's name."""

    name: str
    title: str
    figure: Figure
    about: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Dashboard:
    """Everything on the page. `refresh`: seconds after which it loads itself again; 0 where nothing more happens."""

    title: str
    lede: str
    refresh: int
    tiles: Sequence[Tile]
    failures: Sequence[Failure]
    figures: Sequence[Sequence[Drawing]]
    about_trials: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    commands: Sequence[tuple[str, str]]
    facts: Mapping[str, str]


def write_dashboard(facts: SweepFacts, found: Mapping[str, Result], folder: Path, seconds: float, refresh: int, final: bool) -> Path:
    """Write `index.html`; at the end its figures as `figures/*.png` as well.

    Args:
        seconds: that the sweep has run, over all its starts.
        refresh: seconds after which an open page loads itself again; 0 for a page that stays as it is.

    Raises:
        ReportError: the folder cannot be written.
    """
    page = dashboard(facts, list(found.values()), seconds, refresh)
    environment = Environment(
        loader=PackageLoader("pipelines"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    drawings = [drawing for row in page.figures for drawing in row]
    drawn = {drawing.name: figures.to_svg(drawing.figure, drawing.name, drawing.title) for drawing in drawings}
    text = environment.get_template("sweep.html.j2").render(page=page, drawn=drawn)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        publish(folder / "index.html", lambda path: path.write_text(text, encoding="utf-8"))
        if final:
            (folder / "figures").mkdir(exist_ok=True)
            for drawing in drawings:
                publish(folder / "figures" / f"{drawing.name}.png", partial(figures.save, drawing.figure))
    except OSError as error:
        raise ReportError(f"cannot write the dashboard to {folder}: {error.strerror or error}. Choose another output folder.") from error
    return folder / "index.html"


def dashboard(facts: SweepFacts, found: Sequence[Result], seconds: float, refresh: int) -> Dashboard:
    """What the page says."""
    counts = {outcome: sum(result.trial.outcome == outcome for result in found) for outcome in _OUTCOMES}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    best = best_of(found, facts.objective)
    serving = any(result.trial.cost is not None for result in found)
    return Dashboard(
        title=f"{facts.name}: {facts.target} on {facts.corpus}",
        lede=f"{len(found)} trials over {_listed(facts.dimensions)} on one cache: {told}. Written {time.strftime('%Y-%m-%d %H:%M:%S')}.",
        refresh=refresh,
        tiles=_tiles(facts, found, best, seconds),
        failures=[
            Failure(
                result.trial.name,
                result.trial.outcome,
                [*result.trial.failures, *([result.trial.why] if result.trial.outcome == "left out" else [])],
            )
            for result in found
            if result.trial.failures or result.trial.outcome == "left out"
        ],
        figures=_figures(facts, found, serving),
        about_trials=f"Click a column to sort by it. The best finished trial by {_goal(facts)} stands out.",
        columns=_columns(facts, serving),
        rows=[_row(facts, result, best, serving) for result in found],
        commands=_commands(facts, best),
        facts={
            "storage": facts.storage["root"],
            "search": facts.search,
            "objective": _goal(facts),
            **({"serving": facts.cost_source} if facts.cost_source else {}),
            "cache manifest": facts.manifest,
            "started": facts.started,
            "machines": ", ".join(sorted({host for result in found for host in result.record.hosts})) or "none yet",
        },
    )


_OUTCOMES = ("running", "waiting", "finished", "stopped", "failed", "left out")


def measures(serving: bool) -> dict[str, Any]:
    """What there is to draw of each trial."""
    return {"τ": lambda result: result.tau, **({"tokens/s": lambda result: result.speed} if serving else {})}


def _goal(facts: SweepFacts) -> str:
    return "predicted speed" if facts.objective == "speed" else "τ on the held-out rows"


def _tiles(facts: SweepFacts, found: Sequence[Result], best: Result | None, seconds: float) -> list[Tile]:
    ended = sum(result.trial.outcome in ("finished", "stopped", "failed") for result in found)
    planned = sum(result.trial.outcome != "left out" for result in found)
    store, disk = (sum(result.record.total(name) for result in found) for name in ("store_bytes", "disk_bytes"))
    tiles = [Tile("best τ", _number(None if best is None else best.tau, "{:.2f}"), best.trial.name if best else "no trial is finished yet")]
    if best is not None and best.trial.cost is not None and best.speed is not None:
        tiles.append(Tile("its speed", f"{best.speedup:.2f}×", f"of plain decoding, {best.trial.cost.requests} requests (predicted)"))
    tiles.append(Tile("trials", f"{ended} of {planned}", f"{sum(bool(result.trial.failures) for result in found)} had a failure"))
    tiles.append(Tile("read from the store", _bytes(store), f"{_bytes(disk)} more from the nodes' disks"))
    spent = sum(result.record.seconds for result in found)
    tiles.append(Tile("time", _clock(seconds), f"trials took {duration(spent)}"))
    return tiles


def _figures(facts: SweepFacts, found: Sequence[Result], serving: bool) -> list[list[Drawing]]:
    rows: list[list[Drawing]] = []
    scored = [result for result in found if result.tau is not None]
    paths = axes_of(found)
    if paths:
        over = " × ".join(path.rpartition(".")[2] for path in reversed(paths))
        maps = [Drawing("heat-tau", "Accepted length", heat_map(found, lambda result: result.tau, f"best held-out τ by {over}"))]
        if serving:
            speed = heat_map(found, lambda result: result.speed, "tokens/s of all requests together", "{:,.0f}")
            maps.append(Drawing("heat-speed", "Predicted speed", speed))
        rows.append(maps)
    if scored:
        rows.append(
            [
                Drawing("learning", "Learning curves", learning_figure(scored, facts.objective)),
                Drawing("acceptance", "Acceptance by position", acceptance_by_position(scored, facts.objective)),
            ]
        )
    if len(scored) > 1 and len(facts.dimensions) > 1:
        about = "One line a trial through its values; the better by the objective, the stronger."
        figure = parallel_coordinates(scored, measures(serving), facts.objective)
        rows.append([Drawing("parallel", "Parallel coordinates", figure, about, wide=True)])
    return rows


def _columns(facts: SweepFacts, serving: bool) -> list[Column]:
    names = ["step", *(["tokens/s", "× plain", "draft ms"] if serving else []), "weights", "time", "from store"]
    dimensions = [Column(path.removeprefix("drafter.").removeprefix("train."), True) for path in facts.dimensions]
    return [Column("trial", False), Column("τ", True), Column("state", False), *dimensions, *(Column(name, True) for name in names)]


def _row(facts: SweepFacts, result: Result, best: Result | None, serving: bool) -> Row:
    trial, record, cost = result.trial, result.record, result.trial.cost
    values = [trial.values[path] for path in facts.dimensions]
    cells = [
        Cell(trial.name, trial.name),
        _cell(result.tau, "{:.3f}"),
        Cell(trial.outcome, trial.outcome),
        *(Cell(shown(value), str(value)) for value in values),
    ]
    cells.append(_cell(record.step or None, "{:,}"))
    if serving:
        cells += [
            _cell(result.speed, "{:,.1f}"),
            _cell(result.speedup, "{:.2f}"),
            _cell(None if cost is None else 1000 * cost.draft, "{:.1f}"),
        ]
    cells.append(_cell(trial.parameters / 1e6, "{:.2f} M"))
    cells.append(Cell(_clock(record.seconds), f"{record.seconds:.1f}") if record.starts else Cell("–", ""))
    cells.append(Cell(_bytes(record.total("store_bytes")), str(int(record.total("store_bytes")))))
    is_best = best is not None and best.trial.name == trial.name
    return Row(trial.name, trial.outcome, is_best, cells, trial.command)


def _commands(facts: SweepFacts, best: Result | None) -> list[tuple[str, str]]:
    found = [
        ("Go on where it was:", facts.resuming),
        ("Train the best one longer:", facts.longer),
    ]
    if best is not None:
        found.append(("Evaluate it:", facts.evaluating(best.trial)))
    return found


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "nothing"


def _cell(value: float | None, form: str) -> Cell:
    return Cell("–", "") if value is None else Cell(form.format(value), f"{value:.10g}")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
