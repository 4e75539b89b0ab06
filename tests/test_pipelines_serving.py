"""The jobs around serving as a person runs them, on a tiny random target and an untrained drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import ENVIRONMENT, Here, result_of
from serving_runs import BLOCK, ServingShop, make_shop, write_drafter

from decoding.rounds import RecordedRounds
from decoding.throughput import ThroughputTable

pytestmark = pytest.mark.timeout(600)
CALIBRATE = [
    "calibrate.max_new_tokens=16",
    "calibrate.rounds=60",
    "calibrate.max_passes=3",
    "calibrate.batch_size=3",
    "calibrate.block_rounds=30",
]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    for name, value in {**ENVIRONMENT, "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    return Here(monkeypatch, capsys)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> ServingShop:
    return make_shop(tmp_path_factory.mktemp("shop"))


def ok(here: Here, job: str, overrides: list[str]) -> tuple[dict[str, Any], str]:
    code, output, errors = here.run(job, overrides)
    assert code == 0, errors
    return result_of(output), errors


def is_page(path: str) -> str:
    page = Path(path)
    assert page.with_name("report.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "http" not in text.replace("http://www.w3.org", ""), "works offline"
    assert "mathdefault" not in text, "axes show plain numbers"
    return text


def test_calibrate_records_fits_and_reports(shop: ServingShop, here: Here) -> None:
    ok(here, "prepare", [one for one in shop.overrides("prepare") if not one.startswith(("engine", "run"))])
    result, errors = ok(here, "calibrate", shop.overrides("calibrate", *CALIBRATE))
    assert "rounds to measure on are few" in errors
    record = json.loads((shop.drafter / "calibration.json").read_text())
    assert record["temperatures"] == result["temperatures"]
    assert len(record["temperatures"]) == BLOCK
    assert record["identity"]["temperature"] == 1.0
    assert record["identity"]["target"]["num_layers"] == 8
    rounds = RecordedRounds.from_bytes(Path(result["rounds_file"]).read_bytes(), "rounds")
    assert len(rounds) == result["fitted_rounds"] + result["measured"]["rounds"] >= 60
    assert sorted(set(rounds.domain.tolist())) == ["chat", "math"] == [one["domain"] for one in result["domains"]]
    assert len(set(rounds.prompt.tolist())) == 6 < rounds.requests, "prompts are decoded in several passes"
    assert [one["length"] for one in record["shorter"]] == [1] == [one["length"] for one in result["shorter_blocks"]]
    (short,) = result["shorter_blocks"]
    assert short["rounds"] > 0
    assert short["ratios"] == [pytest.approx(short["acceptance"][0] / short["whole"][0])]
    text = is_page(result["report"])
    assert "few" in text
    assert "Shorter blocks" in text
    assert (Path(result["report"]).parent / "figures" / "domains.svg").is_file()
    assert "position 3" in text

    # What was decoded is taken over; the same rounds from their file give the same temperatures.
    again, _ = ok(here, "calibrate", shop.overrides("calibrate", *CALIBRATE))
    refit, _ = ok(here, "calibrate", shop.overrides("calibrate", *CALIBRATE, f"calibrate.rounds_file={result['rounds_file']}"))
    assert again["temperatures"] == refit["temperatures"] == result["temperatures"]
    message = here.refused(
        "calibrate",
        shop.overrides("calibrate", "calibrate.temperature=0.5", f"calibrate.rounds_file={result['rounds_file']}"),
        shop.drafter,
    )
    assert "temperature 1.0" in message


def test_evaluation_shows_the_reliability_that_was_measured(shop: ServingShop, here: Here) -> None:
    given = [one for one in shop.overrides("evaluate") if not one.startswith("engine")]
    more = ["evaluate.max_new_tokens=6", "evaluate.dtype=float32", "evaluate.threads=1", "tracking=none", "evaluate.prompts=2"]
    result, _ = ok(here, "evaluate", [*given, *more, "evaluate.temperature=1"])
    page = Path(result["report"])
    assert "Reliability of the confidence" in is_page(str(page))
    assert page.with_name("figures").joinpath("reliability.svg").is_file()
    report = json.loads(page.with_name("report.json").read_text())
    assert [one["label"] for one in report["reliability"]] == ["position 1", "position 2", "position 3"]
    calibrated = json.loads((shop.stored / "runs" / "first" / "calibration" / "calibrate.json").read_text())
    for one, position in zip(report["reliability"], calibrated["positions"], strict=True):
        assert sum(bin_["rounds"] for bin_ in one["after"]) == position["trials"]
        gaps = sum(bin_["rounds"] * abs(bin_["predicted"] - bin_["observed"]) for bin_ in one["after"])
        assert gaps / position["trials"] == pytest.approx(position["ece_after"])
    for domain in calibrated["domains"]:
        for when in ("before", "after"):
            seen = sum(bin_["rounds"] for bin_ in domain["diagram"][when])
            assert seen == sum(position["trials"] for position in domain["positions"])
    colder, _ = ok(here, "evaluate", [*given, *more, "evaluate.temperature=0"])
    assert "Reliability of the confidence" not in is_page(colder["report"]), "calibrated at another temperature"


def test_calibrate_needs_a_confidence_head(tmp_path: Path, here: Here) -> None:
    shop = make_shop(tmp_path)
    write_drafter(shop, tmp_path / "tiny llama", confidence=False, confidence_markov=False)
    assert "has no confidence head" in here.refused("calibrate", shop.overrides("calibrate"), shop.drafter)


PROFILE = ["profile.requests=[1,3]", "profile.context=24", "profile.points=3", "profile.rounds=2", "profile.warmup=1"]
SIMULATE = [
    "simulate.concurrency=[1,3]",
    "simulate.steps=20",
    "simulate.replicas=2",
    "simulate.load_seconds=1",
    "simulate.validate=[2]",
    "simulate.validate_load=[1,3,1]",
    "simulate.validate_tokens=12",
    "simulate.validate_requests=3",
]


def test_profile_measures_and_tells_a_stale_table(shop: ServingShop, here: Here) -> None:
    result, _ = ok(here, "profile", shop.overrides("profile", *PROFILE))
    path = Path(result["table"])
    table = ThroughputTable.from_json(path.read_text(), "table")
    assert [curve.requests for curve in table.curves] == [1, 3]
    assert table.curves[1].tokens == (3, 8, 12)
    assert (table.kind, table.block, table.context) == ("measured", BLOCK, 24)
    assert result["stale"] == []
    is_page(result["report"])

    before = path.read_bytes()
    ok(here, "profile", shop.overrides("profile", *PROFILE))
    assert path.read_bytes() == before, "a table of this machine is kept"
    other = shop.folder / "other.json"
    other.write_text(before.decode().replace(table.fingerprint["machine"], "another machine"))
    given, errors = ok(here, "profile", shop.overrides("profile", *PROFILE, f"profile.table={other}"))
    assert "machine: measured with another machine" in errors
    assert len(given["stale"]) == 1
    assert "does not hold on this machine" in is_page(given["report"])
    path.write_bytes(other.read_bytes())
    _, errors = ok(here, "profile", shop.overrides("profile", *PROFILE))
    assert "stale" in errors
    assert "another machine" not in path.read_text(), "measured again"


@pytest.mark.slow
def test_profile_times_the_targets_passes_in_vllm(shop: ServingShop, here: Here) -> None:
    result, _ = ok(here, "profile", shop.overrides("profile", *PROFILE, "profile.context=40", "profile.engine=vllm"))
    path = Path(result["table"])
    assert path.parent.name == "profile-vllm"
    table = ThroughputTable.from_json(path.read_text(), "table")
    assert (table.kind, table.block, table.context) == ("measured", BLOCK, 32), "whole pages of the prefix cache"
    assert [curve.tokens for curve in table.curves] == [(1, 2, 4), (3, 8, 12)]
    assert all(set(curve.draft_seconds) == {0.0} for curve in table.curves)
    assert "drafting and acceptance not included" in table.covers
    assert {"vllm", "machine", "threads"} <= table.fingerprint.keys()
    text = is_page(result["report"])
    assert table.covers in text
    assert "not included" in text

    given = [one for one in SIMULATE if "validate" not in one]
    simulated, _ = ok(here, "simulate", shop.overrides("simulate", *given, f"simulate.table={path}"))
    assert simulated["stale"] == []
    assert "drafting not included" in is_page(simulated["report"])
    message = here.refused("simulate", shop.overrides("simulate", *SIMULATE, f"simulate.table={path}"), shop.drafter)
    assert "in-process decoder" in message


def test_simulate_compares_schedules_and_the_decoder(shop: ServingShop, here: Here) -> None:
    result, errors = ok(here, "simulate", shop.overrides("simulate", *SIMULATE))
    assert "static 4 is left out" in errors
    names = {point["name"] for point in result["points"]}
    assert {"none", "MTP-1", "static 2", "full block", "threshold", "algorithm 1", "asynchronous", "online", "gated"} == names
    assert len(result["points"]) == 2 * len(names)
    for point in result["points"]:
        assert point["throughput"] > 0
        assert 1 <= point["budget"] <= BLOCK + 1
    assert {(one["name"], one["load"]) for one in result["validations"]} == {(name, load) for name in names for load in ("2", "1 3 1")}
    for one in result["validations"]:
        assert 0 < one["low"] <= one["measured"] <= one["high"]
        assert 0 < one["slowest_tenth"] <= one["user_speed"]
        assert one["predicted"] > 0
        assert 1 <= one["tau"] <= BLOCK + 1
        assert one["concurrency"] == (2 if one["load"] == "2" else None)
    assert [one["load"] for one in result["comparisons"]] == ["2", "1 3 1"]
    for one in result["comparisons"]:
        measured = {v["name"]: v["measured"] for v in result["validations"] if v["load"] == one["load"]}
        fixed = {name: measured[name] for name in ("none", "MTP-1", "static 2", "full block", "threshold")}
        assert one["measured"] == max(fixed.values())
        assert one["over_best_fixed"]["gated"] == pytest.approx(measured["gated"] / max(fixed.values()) - 1)
    text = is_page(result["report"])
    assert "cost table is measured" in text
    assert "On the real decoder" in text

    # Stopped after some runs and started again, it makes only those that are missing; the finished ones keep their times.
    runs = sorted((shop.stored / "runs" / "first" / "simulation" / "runs").iterdir())
    assert len(runs) == len(names) * 2 * 2
    before = {run: run.read_bytes() for run in runs}
    runs[0].unlink()
    runs[1].write_text("{torn")
    again, _ = ok(here, "simulate", shop.overrides("simulate", *SIMULATE))
    assert {run for run in runs if run.read_bytes() != before[run]} == set(runs[:2])
    assert len(again["validations"]) == len(result["validations"])


def test_simulate_refuses_rounds_of_another_temperature(shop: ServingShop, here: Here) -> None:
    told = here.refused("simulate", shop.overrides("simulate", *SIMULATE, "simulate.temperature=0.5"), shop.drafter)
    assert "recorded at temperature 1.0" in told


def test_simulate_needs_rounds_and_a_table(tmp_path: Path, here: Here) -> None:
    shop = make_shop(tmp_path)
    assert "pipelines.calibrate" in here.refused("simulate", shop.overrides("simulate"), shop.drafter)
