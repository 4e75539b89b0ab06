"""The page about a drafter's confidence: reliability diagrams by position, errors before and after scaling, domains."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from decoding.calibration import Calibrator, MeanQuality, PositionQuality
from pipelines.comparison_figures import LABELS, reliability_figure
from pipelines.figures import MARKERS, MUTED, SERIES, styled
from pipelines.page import Page, PageTable, Section, Tile, percent
from pipelines.report_data import Reliability
from storage.calibration import ShorterBlocks


@dataclass(frozen=True)
class DomainQuality:
    """One domain's share of the measured rounds."""

    domain: str
    quality: MeanQuality
    positions: Sequence[PositionQuality]
    drifts: bool
    diagram: Reliability


@dataclass(frozen=True)
class CalibrationFindings:
    """What the page is made of."""

    title: str
    fitted: int
    calibrator: Calibrator
    block: int
    diagrams: Sequence[Reliability]
    positions: Sequence[PositionQuality]
    quality: MeanQuality
    domains: Sequence[DomainQuality]
    acceptance: Sequence[float]
    shorter: Sequence[ShorterBlocks]
    notes: Sequence[str]
    bins: int
    facts: dict[str, str]


def calibration_page(found: CalibrationFindings) -> Page:
    """Words, figures and tables."""
    quality, last = found.quality, found.positions[-1]
    shorter = [
        Section(
            "blocks",
            "Shorter blocks",
            "Slots of a block see each other, so a block made with fewer of them is another draft than the first tokens of a whole one. "
            "Survival of the prefix, measured on the same prompts; the draft gate chooses among these lengths.",
            blocks_figure(found),
            "Survival of the prefix by position, one line a block length",
            [_blocks_table(found.shorter)],
        )
    ]
    return Page(
        kind="confidence",
        title=found.title,
        lede=(
            f"How likely a draft prefix survives, by the drafter's own confidence: off by {percent(quality.ece_before)} on the mean before "
            f"scaling and {percent(quality.ece_after)} after it. A perfect calibrator would show {percent(quality.floor)} by chance "
            f"at this number of rounds."
        ),
        tiles=[
            Tile("mean ECE after scaling", percent(quality.ece_after), f"{percent(quality.ece_before)} before"),
            Tile("noise floor", percent(quality.floor), f"19 times in 20 below {percent(quality.floor_high)}"),
            Tile("rounds measured", f"{quality.rounds:,}", f"{found.fitted:,} others fitted to"),
            Tile("AUROC, position 1", f"{found.positions[0].auroc_after:.2f}", f"{last.auroc_after:.2f} at position {last.position}"),
        ],
        notes=found.notes,
        sections=[
            Section(
                "reliability",
                "Does it happen as often as it is said?",
                "Survival of the prefix up to each position: predicted, in equal bins, against observed; on the diagonal they agree. "
                "The size of a mark follows the number of rounds in its bin.",
                reliability_figure(found.diagrams),
                "Observed against predicted survival by position",
            ),
            Section(
                "positions",
                "By position",
                "Temperatures are fitted from left to right, each on the error of the cumulative product.",
                ece_figure(found),
                "Calibration error by position",
                [_position_table(found.positions, found.calibrator)],
            ),
            Section(
                "domains",
                "By domain",
                "One set of temperatures serves all domains. A domain drifts where chance does not explain its error, by over one point. "
                "The diagrams hold the prefixes of all positions together.",
                reliability_figure([one.diagram for one in found.domains]),
                "Observed against predicted survival by domain",
                tables=[_domain_table(found.domains)],
            ),
            *(shorter if found.shorter else []),
        ],
        facts=found.facts,
        picture=reliability_figure(found.diagrams),
        footer=[
            f"ECE: mean distance of predicted probability and observed rate over {found.bins} equal bins, weighted by rounds. AUROC: how "
            "well the probability sorts prefixes that survive from those that do not. Brier: mean squared distance. The label is always "
            "that the whole prefix up to the position was accepted. Rounds were fitted to and measured on different prompts."
        ],
    )


@styled
def ece_figure(found: CalibrationFindings) -> Figure:
    """Error by position before and after, and the noise floor as a band."""
    figure = Figure(figsize=(6.4, 3.1))
    axes = figure.subplots()
    at = [one.position for one in found.positions]
    axes.fill_between(at, 0, [100 * one.floor.high for one in found.positions], color=MUTED, alpha=0.18, linewidth=0, label="chance alone")
    for index, values in enumerate(([one.ece_before for one in found.positions], [one.ece_after for one in found.positions])):
        axes.plot(at, [100 * value for value in values], color=SERIES[1 - index], marker=MARKERS[index], label=LABELS[index])
    axes.set(xlabel="draft position", ylabel="ECE of prefix survival, %", xticks=at)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    return figure


@styled
def blocks_figure(found: CalibrationFindings) -> Figure:
    """Survival by position, one line a block length."""
    figure = Figure(figsize=(6.4, 3.1))
    axes = figure.subplots()
    whole = (found.block, found.acceptance)
    for index, (length, acceptance) in enumerate([whole, *((one.length, one.acceptance) for one in reversed(found.shorter))]):
        at = range(1, len(acceptance) + 1)
        axes.plot(at, [100 * value for value in acceptance], color=SERIES[index % 6], marker=MARKERS[index % 6], label=f"{length}")
    axes.set(xlabel="draft position", ylabel="prefix accepted, %", xticks=range(1, whole[0] + 1))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", title="tokens a block")
    return figure


def _blocks_table(shorter: Sequence[ShorterBlocks]) -> PageTable:
    return PageTable(
        ("tokens a block", "rounds", "prefix accepted", "of whole blocks", "accepted tokens", "of whole blocks", "mean ECE"),
        [
            (
                str(one.length),
                f"{one.rounds:,}",
                " ".join(percent(value) for value in one.acceptance),
                " ".join(percent(value) for value in one.whole),
                f"{sum(one.acceptance):.3f}",
                f"{sum(one.whole):.3f}",
                percent(one.ece),
            )
            for one in shorter
        ],
        "of whole blocks: their first tokens, on the same prompts. ECE: with the temperatures of whole blocks.",
    )


def _position_table(positions: Sequence[PositionQuality], calibrator: Calibrator) -> PageTable:
    return PageTable(
        ("position", "temperature", "rounds", "survived", "ECE before", "ECE after", "noise floor", "AUROC", "Brier before", "Brier after"),
        [
            (
                str(one.position),
                f"{temperature:.2f}",
                f"{one.trials:,}",
                percent(one.rate),
                percent(one.ece_before),
                percent(one.ece_after),
                percent(one.floor.mean),
                f"{one.auroc_after:.3f}",
                f"{one.brier_before:.4f}",
                f"{one.brier_after:.4f}",
            )
            for one, temperature in zip(positions, calibrator.temperatures, strict=True)
        ],
    )


def _domain_table(domains: Sequence[DomainQuality]) -> PageTable:
    return PageTable(
        ("domain", "rounds", "mean ECE before", "after", "noise floor", "95 % of chance below", "position 1 survived", ""),
        [
            (
                one.domain,
                f"{one.quality.rounds:,}",
                percent(one.quality.ece_before),
                percent(one.quality.ece_after),
                percent(one.quality.floor),
                percent(one.quality.floor_high),
                percent(one.positions[0].rate),
                "drifts" if one.drifts else "",
            )
            for one in domains
        ],
    )
