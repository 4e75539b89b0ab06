"""A report page of tiles, figures and tables in the style of the evaluation's, for the jobs around serving."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pipelines import figures
from pipelines.plain_data import ReportError


@dataclass(frozen=True)
class Tile:
    """One headline number; the first of a page is the main one."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class PageTable:
    """Cells as they are shown; the first column is a name."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A card: words, a figure, tables. `name` is its anchor and the figure's file name."""

    name: str
    title: str
    about: str = ""
    figure: Figure | None = None
    described: str = ""
    tables: Sequence[PageTable] = ()


@dataclass(frozen=True)
class Page:
    """Everything on the page. `picture` is the figure that stands for it as report.png."""

    kind: str
    title: str
    lede: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    facts: dict[str, str]
    picture: Figure
    notes: Sequence[str] = ()
    footer: Sequence[str] = field(default_factory=tuple)


def render_page(page: Page) -> str:
    """The page as one string, with everything it needs inside."""
    environment = Environment(
        loader=PackageLoader("pipelines"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    drawn = {
        section.name: figures.to_svg(section.figure, section.name, section.described or section.title)
        for section in page.sections
        if section.figure is not None
    }
    return environment.get_template("page.html.j2").render(page=page, figures=drawn)


def write_page(page: Page, folder: Path) -> Path:
    """Write `report.html`, `report.png` and `figures/*.png|svg`; returns the page's path.

    Raises:
        ReportError: the folder cannot be written.
    """
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for section in page.sections:
            if section.figure is not None:
                for suffix in (".png", ".svg"):
                    publish(folder / "figures" / f"{section.name}{suffix}", partial(figures.save, section.figure))
        publish(folder / "report.png", partial(figures.save, page.picture))
        text = render_page(page)
        publish(folder / "report.html", lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot write the report to {folder}: {error.strerror or error}. Choose another output folder.") from error
    return folder / "report.html"


def percent(share: float, digits: int = 1) -> str:
    """`12.3 %`, or a dash for what is not a number."""
    return "–" if share != share else f"{100 * share:.{digits}f} %"


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Finished beside its place and then moved there, so that no reader sees half a page."""
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
