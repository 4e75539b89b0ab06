"""What a sweep shows: its page, the best of its trials, and the records that both are made of."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_runs import Page

from actors.trial_record import TrialRecord
from decoding.prediction import ServingCost
from pipelines.sweep_report import dashboard, write_dashboard
from pipelines.sweep_trials import Result, SweepFacts, Trial, best_of


def made_up(count: int = 6, name: str = "made_up", running: bool = True) -> tuple[SweepFacts, dict[str, Result]]:
    """A sweep in the middle of its work, with every outcome there is."""
    draw, outcomes = (
        np.random.default_rng(0),
        ["finished", "finished", "stopped", "failed", "left out", "running" if running else "finished"],
    )
    found = {}
    for index in range(count):
        rank, block = (0, 64, 256)[index % 3], (3, 7)[index // 3 % 2]
        outcome: Any = outcomes[index % len(outcomes)]
        values = {"drafter.head_rank": rank, "drafter.block_length": block}
        trial = Trial(
            f"head_rank{rank}-block_length{block}",
            values,
            f"run{index}",
            10_000 * (rank + 1),
            ServingCost(8, block, 0.01, 0.02, 0.02),
            "python -m x",
        )
        trial.outcome, trial.failures = outcome, ["<script>alert(1)</script> & died"] if outcome == "failed" else []
        trial.why = "too <b>slow</b>" if outcome == "left out" else ""
        record = TrialRecord(seconds=10.0 * index, starts=1)
        if outcome != "left out":
            for step in (100, 200, 300):
                tv = {f"heldout/one_minus_tv@{k + 1}": float(draw.uniform(0.2, 0.4)) for k in range(block)}
                record.add(
                    {
                        "step": step,
                        "heldout/tau_teacher_forced": 1.2 + step / 1000 + 0.05 * index,
                        "store_bytes": 1e6,
                        "disk_bytes": 2e6,
                        **tv,
                    }
                )
        found[trial.name] = Result(trial, record)
    facts = SweepFacts(
        name,
        "tiny",
        "corpus",
        {"root": "/somewhere"},
        [],
        ["drafter.head_rank", "drafter.block_length"],
        "grid",
        "abc",
        "tau",
        "measured",
        "now",
    )
    return facts, found


def test_the_page_needs_nothing_from_outside_and_shows_every_trial(tmp_path: Path) -> None:
    facts, found = made_up()
    page = Page.of(write_dashboard(facts, found, tmp_path, 60, 15, final=False))
    assert page.links == []
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert "://" not in re.sub(r"http://www\.w3\.org\S*", "", (tmp_path / "index.html").read_text())
    cells = [row for row in page.rows if row]
    assert {row[0]: row[2] for row in cells} == {name: result.trial.outcome for name, result in found.items()}
    assert "<script>alert(1)</script> & died" in page.text, "what failed is told, as text"
    assert page.tags.count("script") == 1
    assert "location.reload" in (tmp_path / "index.html").read_text()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_the_table_sorts_in_a_browser(tmp_path: Path) -> None:
    facts, found = made_up(running=False)
    path = write_dashboard(facts, found, tmp_path, 60, 0, final=False)
    click = "<script>document.querySelectorAll('#trials th button')[1].click()</script></body>"
    path.write_text(path.read_text().replace("</body>", click))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom", f"file://{path}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    page = Page()
    page.feed(shown)
    taus = [row[1] for row in page.rows if row]
    scored = [float(tau) for tau in taus if tau]
    assert scored == sorted(scored, reverse=True)
    assert taus[-1] == "", "what has no figure comes last"
    assert 'aria-sort="descending"' in shown


def test_the_finished_page_stays_as_it_is_and_leaves_pictures(tmp_path: Path) -> None:
    facts, found = made_up(running=False)
    page = write_dashboard(facts, found, tmp_path, 60, 0, final=True).read_text()
    assert "location.reload" not in page
    assert "http-equiv" not in page
    for name in ("heat-tau", "heat-speed", "learning", "acceptance", "parallel"):
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [0, 1])
def test_a_page_with_hardly_anything_on_it(tmp_path: Path, count: int) -> None:
    facts, found = made_up(count)
    assert write_dashboard(facts, found, tmp_path, 0, 15, final=True).is_file()


def test_the_best_is_the_finished_trial_with_the_highest_objective() -> None:
    _, found = made_up()
    best = best_of(found.values(), "tau")
    assert best is not None
    assert best.trial.name == list(found)[1]
    slow = replace(found[best.trial.name], trial=replace(best.trial, cost=ServingCost(8, 3, 10, 10, 1)))
    by_speed = best_of([*(result for result in found.values() if result is not best), slow], "speed")
    assert by_speed is not None
    assert by_speed.trial.name == next(iter(found))
    assert best_of([], "tau") is None


def test_rows_of_a_record_come_again_after_a_restart_once() -> None:
    record = TrialRecord()
    for row in (
        {"step": 2, "loss": 3.0},
        {"step": 4, "loss": 2.0},
        {"step": 4, "heldout/tau_teacher_forced": 1.5},
        {"step": 6, "loss": 1.0},
    ):
        record.add(row)
    record.drop_after(4)
    for row in ({"step": 6, "loss": 1.1, "store_bytes": 5.0}, {"step": 4, "loss": 2.1, "store_bytes": 7.0}):
        record.add(row)
    assert [(row["step"], row.get("loss")) for row in record.rows] == [(2, 3.0), (4, 2.1)]
    assert record.total("store_bytes") == 7.0
    assert record.scores == []


def test_a_dashboard_of_one_field_draws_one_row() -> None:
    facts, found = made_up()
    one = [replace(result, trial=replace(result.trial, values={"drafter.head_rank": index})) for index, result in enumerate(found.values())]
    page = dashboard(replace(facts, dimensions=["drafter.head_rank"]), one, 0, 0)
    assert [drawing.name for row in page.figures for drawing in row] == ["heat-tau", "heat-speed", "learning", "acceptance"]
