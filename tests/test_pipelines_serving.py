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
CALIBRATE = ["calibrate.max_new_tokens=16", "calibrate.rounds=60", "calibrate.max_passes=3", "calibrate.batch_size=3"]


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
    text = is_page(result["report"])
    assert "few" in text
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


def test_calibrate_needs_a_confidence_head(tmp_path: Path, here: Here) -> None:
    shop = make_shop(tmp_path)
    write_drafter(shop, tmp_path / "tiny llama", confidence=False, confidence_markov=False)
    assert "has no confidence head" in here.refused("calibrate", shop.overrides("calibrate"), shop.drafter)


PROFILE = ["profile.requests=[1,3]", "profile.context=24", "profile.points=3", "profile.rounds=2", "profile.warmup=1"]
SIMULATE = ["simulate.concurrency=[1,3]", "simulate.steps=20", "simulate.replicas=2", "simulate.load_seconds=1", "simulate.validate=[2]"]


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


def test_simulate_compares_schedules_and_the_decoder(shop: ServingShop, here: Here) -> None:
    result, errors = ok(here, "simulate", shop.overrides("simulate", *SIMULATE, "simulate.validate_tokens=12"))
    assert "static 4 is left out" in errors
    names = {point["name"] for point in result["points"]}
    assert {"none", "MTP-1", "static 2", "full block", "threshold", "algorithm 1", "asynchronous", "online", "gated"} == names
    assert len(result["points"]) == 2 * len(names)
    for point in result["points"]:
        assert point["throughput"] > 0
        assert 1 <= point["budget"] <= BLOCK + 1
    assert {one["name"] for one in result["validations"]} == names
    for one in result["validations"]:
        assert one["measured"] > 0
        assert one["predicted"] > 0
        assert 1 <= one["tau"] <= BLOCK + 1
    text = is_page(result["report"])
    assert "cost table is measured" in text
    assert "On the real decoder" in text


def test_simulate_needs_rounds_and_a_table(tmp_path: Path, here: Here) -> None:
    shop = make_shop(tmp_path)
    assert "pipelines.calibrate" in here.refused("simulate", shop.overrides("simulate"), shop.drafter)
