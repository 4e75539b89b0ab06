"""Comparison of drafters: the figures against plain counts, the tables, the pictures, the page."""

import json
import random
import re
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from test_report import Page, made_up

from actors.decoder import PLAIN, Decoded
from decoding.metrics import threshold_counts
from decoding.settings import Generation, Round, Seconds
from pipelines import comparison_figures as comparison
from pipelines import figures
from pipelines.prompt_sets import PromptSet
from pipelines.report import EvaluationReport, HeadCost, SampleRound, SampleText, comparisons, render_html
from pipelines.report_data import Sweep, ThresholdPoint
from pipelines.scores import by_domain, drafter_result, gains, score, tau_macro, threshold_sweeps
from pipelines.tables import (
    COLUMNS,
    accepted_length_table,
    comparison_tables,
    long_rows,
    markdown,
    markdown_report,
    round_profile,
    round_tables,
)

SETS = {"gsm8k": ("math", 30), "aime25": ("math", 6), "humaneval": ("code", 12), "mt-bench": ("chat", 9)}
SHAPES = {
    "dspark": {"kind": "dspark, markov head", "layers": 2, "block_length": 5},
    "dspark deep": {"kind": "dspark, markov head", "layers": 4, "block_length": 5},
    "dspark long": {"kind": "dspark, markov head", "layers": 2, "block_length": 7},
    "dflash": {"kind": "dflash", "layers": 2, "block_length": 5},
    PLAIN: {"kind": "plain decoding", "layers": 0, "block_length": 0},
}


def played(seed: int, block: int, rate: float) -> Decoded:
    """A request whose every draft token passes with that probability."""
    rng = random.Random(seed)
    rounds = []
    for _ in range(rng.randrange(3, 12)):
        accepted = 0
        while accepted < block and rng.random() < rate:
            accepted += 1
        confidence = tuple(rng.random() for _ in range(block))
        rounds.append(Round(block, accepted, accepted + 1, confidence, tuple(range(block))))
    tokens = [7] * (1 + sum(r.committed for r in rounds))
    n = len(rounds)
    drafted = Generation(tokens, rounds, "length", Seconds(0.1, 0.015 * n, 0.005 * n, 0.05 * n, 0.1 + 0.08 * n))
    plain = Generation(
        tokens, [Round(0, 0, 1)] * (len(tokens) - 1), "length", Seconds(0.1, 0.0, 0.0, 0.05 * len(tokens), 0.1 + 0.06 * len(tokens))
    )
    return Decoded(plain if not block else drafted, plain)


def prompt_sets() -> tuple[PromptSet, ...]:
    return tuple(
        PromptSet(name, "made up", tuple(SimpleNamespace(domain=domain) for _ in range(count)), (None,) * count)  # type: ignore[arg-type]
        for name, (domain, count) in SETS.items()
    )


def outcomes(names=tuple(SHAPES)) -> dict[str, dict[str, list[Decoded]]]:
    rates = {"dspark": 0.7, "dspark deep": 0.75, "dspark long": 0.7, "dflash": 0.5, PLAIN: 0.0}
    return {
        name: {part: [played(i, SHAPES[name]["block_length"], rates[name]) for i in range(count)] for part, (_, count) in SETS.items()}
        for name in names
    }


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("pipelines.scores.RESAMPLES", 200)


@lru_cache
def compared(names=tuple(SHAPES)) -> EvaluationReport:
    sets, found = prompt_sets(), outcomes(names)
    results = tuple(drafter_result(name, SHAPES[name], sets, found[name]) for name in names)
    base = made_up()
    return EvaluationReport(
        **{
            **{field: getattr(base, field) for field in base.__dataclass_fields__},
            "drafters": results,
            "gains": gains(sets, found),
            "sweeps": threshold_sweeps(sets, found[names[0]]),
            "head_costs": tuple(
                HeadCost(name, 128, (512, 1024), 0.010, 0.010 + 0.0001 * SHAPES[name]["block_length"], 0.04)
                for name in names
                if name.startswith("dspark")
            ),
            "prompts_are": "prompts of 4 benchmarks",
        }
    )


def test_a_score_is_what_a_plain_count_gives():
    parts = [played(seed, 5, 0.6) for seed in range(8)]
    found = score("x", "math", parts)
    rounds = [r for part in parts for r in part.drafted.rounds]
    assert (found.prompts, found.rounds) == (8, len(rounds))
    assert found.tau_pooled.value == pytest.approx(sum(r.committed for r in rounds) / len(rounds))
    assert found.verify_rate.value == pytest.approx(sum(r.accepted + 1 for r in rounds) / (6 * len(rounds)))
    assert found.verify_waste.value == pytest.approx(sum(5 - r.accepted for r in rounds) / (5 * len(rounds)))
    seconds = [part.drafted.seconds for part in parts]
    assert found.timing.drafted_seconds == pytest.approx(sum(s.total for s in seconds))
    other = sum(s.total - s.prefill - s.draft - s.head - s.verify for s in seconds) / sum(s.total - s.prefill for s in seconds)
    assert found.timing.other_share == pytest.approx(other)


def test_macro_weighs_every_benchmark_alike_and_brackets_the_truth():
    """Benchmarks of known accepted length: geometric acceptance, so tau = (1 - p^(g+1)) / (1 - p)."""
    truth = np.mean([(1 - p**6) / (1 - p) for p in (0.3, 0.8)])
    covered = 0
    for trial in range(25):
        parts = [[played(1000 * trial + i, 5, p) for i in range(count)] for p, count in ((0.3, 60), (0.8, 20))]
        macro = tau_macro(parts, seed=trial)
        naive = [sum(r.committed for d in part for r in d.drafted.rounds) / sum(len(d.drafted.rounds) for d in part) for part in parts]
        assert macro.value == pytest.approx(sum(naive) / 2)
        assert macro.low < macro.value < macro.high
        covered += macro.low <= truth <= macro.high
    assert covered >= 20


def test_a_gain_over_oneself_is_nothing_and_pairs_are_drawn_together():
    sets, found = prompt_sets(), outcomes(("dspark", "dflash"))
    found["same"] = found["dspark"]
    by_name = {gain.over: gain for gain in gains(sets, found)}
    assert (by_name["same"].value.value, by_name["same"].value.low, by_name["same"].value.high) == (0, 0, 0)
    ours, theirs = (tau_macro([found[name][part.name] for part in sets]).value for name in ("dspark", "dflash"))
    assert by_name["dflash"].value.value == pytest.approx(ours / theirs - 1)
    assert 0 < by_name["dflash"].value.low < by_name["dflash"].value.value


def test_thresholds_cut_where_a_walk_through_the_round_stops():
    sets, found = prompt_sets(), outcomes(("dspark",))
    sweeps = {sweep.label: sweep for sweep in threshold_sweeps(sets, found["dspark"])}
    assert set(sweeps) == {"math", "code", "chat"}
    for domain, parts in by_domain(sets, found["dspark"]).items():
        for point in sweeps[domain].points:
            accepted = rejected = 0
            for r in (r for part in parts for r in part.drafted.rounds):
                for k, confidence in enumerate(r.confidence):
                    if confidence < point.threshold:
                        break
                    accepted, rejected = accepted + (k < r.accepted), rejected + (k >= r.accepted)
            assert (point.accepted, point.rejected) == (accepted, rejected)
    assert sweeps["math"].points[0].rejected > 0
    assert threshold_sweeps(sets, {name: [played(1, 0, 0.0)] * count for name, (_, count) in SETS.items()}) == ()


def test_the_stop_token_ends_a_rounds_trials_in_the_sweep():
    stopped = Round(4, 2, 2, (0.9, 0.9, 0.9, 0.9), (1, 2, 3, 4))
    assert threshold_counts([stopped], 0.5) == (2, 0)
    assert threshold_counts([stopped], 0.95) == (0, 0)


def test_a_rounds_time_adds_up_stage_by_stage():
    """Every made-up round takes 15 + 5 + 50 ms and 10 ms outside the models, every plain token 60 ms (see `played`)."""
    report = compared()
    (table,) = round_tables(report)
    assert [row[0].text for row in table.rows] == list(SHAPES)
    for result in report.drafters[:-1]:
        profile = round_profile(result)
        assert profile["round_ms"] == pytest.approx(80)
        assert [profile[f"{stage}_ms"] for stage in ("draft", "head", "verify", "outside")] == pytest.approx([15, 5, 50, 10])
        assert profile["outside_share"] == pytest.approx(10 / 80)
        prompts = sum(score.prompts for score in result.benchmarks)
        plain_rounds = sum(score.timing.plain_tokens for score in result.benchmarks) - prompts
        assert profile["plain_round_ms"] == pytest.approx(60 * (plain_rounds + prompts) / plain_rounds)
    assert [cell.text for cell in table.rows[0][1:6]] == ["80.0", "15.0", "5.0", "50.0", "10.0"]
    assert [cell.text for cell in table.rows[-1][2:4]] == ["0.0", "0.0"], "nobody drafts"
    assert "Where the time of a round goes" in markdown_report(report)
    assert round_tables(made_up()) == ()


def test_the_table_has_every_benchmark_the_macro_average_and_the_gains():
    report = compared()
    table = accepted_length_table(report)
    assert table.head == ("drafter", "gsm8k", "aime25", "humaneval", "mt-bench", "macro")
    assert table.groups == (("", 1), ("math", 2), ("code", 1), ("chat", 1), ("", 1))
    assert [row[0].text for row in table.rows] == [*SHAPES, "dspark over dspark deep", "dspark over dspark long", "dspark over dflash"]
    first = report.drafters[0]
    assert table.rows[0][-1].text == f"{first.tau_macro.value:.2f}"
    assert table.rows[4][1].text == "1.00"
    gain = first.benchmarks[2].tau_pooled.value / report.drafters[3].benchmarks[2].tau_pooled.value - 1
    assert table.rows[-1][3].text == f"{100 * gain:+.1f} %"
    lines = markdown(table).splitlines()
    assert len({line.count(" | ") for line in lines}) == 1
    assert len(lines) == 2 + len(table.rows)
    assert comparison_tables(compared(("dspark",)))  # one drafter, several benchmarks
    assert comparison_tables(made_up()) == ()


def test_rows_for_json_and_wandb_are_complete():
    report = compared()
    rows = long_rows(report)
    assert len(rows) == len(SHAPES) * (len(SETS) + 3 + 1)
    assert all(tuple(row) == COLUMNS for row in rows)
    own = next(row for row in rows if (row["drafter"], row["set"]) == ("dflash", "humaneval"))
    assert own["tau_low"] < own["tau"] < own["tau_high"]
    assert own["wall_clock_ratio"] == report.drafters[3].benchmarks[2].timing.ratio
    assert json.loads(json.dumps(rows)) == rows


def test_markdown_cannot_be_broken_out_of():
    report = compared(("dspark", "dflash"))
    evil = "a|b\n# <script>`x`[y](z)"
    report = EvaluationReport.from_dict({**report.to_dict(), "title": evil, "notes": [evil]})
    text = markdown_report(report)
    assert "<script" not in text.replace("\\<script", "")
    assert not re.search(r"(?<!\\)\|b", text)
    assert len([line for line in text.splitlines() if line.startswith("# ")]) == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda: comparison.benchmark_figure(()),
        lambda: comparison.domain_acceptance_figure(()),
        lambda: comparison.block_figure(compared().drafters, compared().head_costs),
        lambda: comparison.threshold_figure(()),
        lambda: comparison.threshold_figure([Sweep("nothing let through", (ThresholdPoint(0.9, 3, 0, 0),))]),
    ],
)
def test_comparisons_can_be_drawn(draw, tmp_path):
    figure = draw()
    assert isinstance(figure, Figure)
    assert figures.save(figure, tmp_path / "x.png").stat().st_size > 0


def test_depth_and_block_length_are_drawn_only_where_they_vary():
    results = {result.name: result for result in compared().drafters}
    assert comparison.has_depths([results["dspark"], results["dspark deep"]])
    assert not comparison.has_depths([results["dspark"], results["dspark long"], results["dflash"]])
    assert comparison.has_block_lengths([results["dspark"], results["dspark long"]])
    assert not comparison.has_block_lengths([results["dspark"], results["dflash"], results[PLAIN]])


def test_drafters_that_vary_alone_are_lines():
    """Others would be lone points in the way."""
    report = compared()
    by_block = comparison.block_figure(report.drafters, report.head_costs)
    by_depth = comparison.depth_figure(report.drafters)
    for figure, x in ((by_block, lambda result: result.block_length), (by_depth, lambda result: result.layers)):
        results = {result.name: result for result in report.drafters}
        wanted = sorted(x(results[name]) for name in ("dspark", "dspark long" if figure is by_block else "dspark deep"))
        drawn = [list(bars.lines[0].get_xdata()) for bars in figure.axes[0].containers]
        assert drawn == [wanted]


def test_the_page_compares_and_shows_what_was_rejected():
    report = compared()
    evil = "<script>alert(1)</script>"
    rounds = (SampleRound(4, 1, ("a ", "b "), (0.9, 0.4, 0.2, 0.1), (evil, "x", "y")), SampleRound(3, 3, ("c", "d", "e", "f")))
    report = EvaluationReport.from_dict({**report.to_dict(), "samples": []})
    report = EvaluationReport(**{**report.__dict__, "samples": (SampleText("math", "?", "first", rounds),)})
    assert EvaluationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    html = render_html(report)
    page = Page(html)
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    rejected = [attributes for tag, attributes in page.elements if tag == "del" and attributes.get("title")]
    assert len(rejected) == 1
    assert "draft token 2 of 4, rejected" in rejected[0]["title"]
    assert "with it fell “xy”" in rejected[0]["title"]
    assert evil in page.text
    assert "safe }}" not in page.text
    for words in ("dspark over dflash", "macro", "mt-bench", "Confidence threshold", "prompts of 4 benchmarks"):
        assert words in page.text
    drawn = {"benchmarks", "drafters_by_domain", "depth", "block_length", "thresholds", "reliability"}
    assert {part.name for part in comparisons(report)} == drawn
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_a_sample_keeps_the_texts_of_rejected_tokens():
    rounds = [Round(3, 1, 2, draft=(4, 5, 6)), Round(3, 1, 1, draft=(7, 8, 9)), Round(2, 2, 3, draft=(1, 2))]
    text = SampleText.from_rounds("math", "?", list("abcdefg"), rounds, lambda token: f"<{token}>")
    assert [r.rejected for r in text.rounds] == [("<5>", "<6>"), (), ()]  # the second round ended with the stop token
