"""The plan: the published figure, ours beside it by an independent sum, and inputs that say where they come from."""

import json
from pathlib import Path

import pytest
from pipeline_runs import ENVIRONMENT, Here, result_of
from tiny_models import HIDDEN, write_tiny_model


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    for name, value in {**ENVIRONMENT, "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    return Here(monkeypatch, capsys)


def test_deepspecs_default_setting_arrives_at_the_published_38_terabytes(here: Here, tmp_path: Path) -> None:
    code, output, errors = here.run("plan", ["target=qwen3_4b", f"output={tmp_path}"])
    assert (code, errors) == (0, "")
    plan = result_of(output)
    assert plan["published"]["bytes_per_token"] == 30_726
    assert plan["published"]["bytes"] == 30_726 * 1_350_000 * 915
    assert "38.0 TB" in output
    assert "inferred" in plan["inputs"]["mean_tokens"]["source"]
    share, ratios = plan["inputs"]["supervised_share"]["value"], plan["inputs"]["codecs"]["value"]
    for codec, found in plan["codecs"].items():
        # Five planes of 2560 channels for each token, the last state with its position for the supervised share, and the token's id.
        each = 5 * 2560 * 2 * ratios[codec]["context"] + share * (2560 * 2 * ratios[codec]["last_hidden"] + 4) + 4
        assert found["bytes_per_token"] == pytest.approx(each)
        assert found["bytes"] == pytest.approx(each * 1_350_000 * 915)
        assert (found["shards"] - 1) * 256 * 2**20 < found["bytes"] <= found["shards"] * 256 * 2**20
        assert codec in output
    assert plan["codecs"]["lossless"]["ratio"] <= 0.70
    assert plan["codecs"]["fp8"]["ratio"] <= 0.50
    assert all(entry["source"] for entry in plan["inputs"].values())


def test_hours_rates_and_cost_follow_from_what_is_given(here: Here, tmp_path: Path) -> None:
    given = {
        "rows": 1000,
        "mean_tokens": 500,
        "epochs": 4,
        "producer_tokens_per_second": 1000,
        "trainer_tokens_per_second": 2500,
        "producers": 2,
        "trainers": 5,
        "gpu_hour_price": 3.6,
        "tb_month_price": 1e6,
        "months": 2,
    }
    overrides = [f"plan.{name}={value}" for name, value in given.items()]
    code, output, _ = here.run("plan", ["target=Qwen3-8B", f"output={tmp_path}", *overrides])
    assert code == 0
    plan = result_of(output)
    assert plan["work"] == pytest.approx(
        {
            "producer_gpu_hours": 500 / 3600,
            "producer_hours": 250 / 3600,
            "trainer_gpu_hours": 800 / 3600,
            "trainer_hours": 160 / 3600,
            "producers_per_trainer": 2.5,
            "producer_cost": 0.5,
            "trainer_cost": 0.8,
        }
    )
    raw = plan["codecs"]["raw"]
    assert raw["write_bytes_per_second"] == pytest.approx(2000 * raw["bytes_per_token"])
    assert raw["read_bytes_per_second"] == pytest.approx(12_500 * raw["bytes_per_token"])
    assert raw["storage_cost"] == pytest.approx(2 * raw["bytes"] / 1e6)
    assert {name for name, entry in plan["inputs"].items() if entry["source"] == "given"} == given.keys()
    assert plan["machine"]["rows_that_fit"]["raw"] == 1000, "16 GB fit on any disk that runs tests, or the plan says how many do"


def test_any_model_with_a_config_and_no_weights(here: Here, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    (folder / "model.safetensors").unlink()
    code, output, _ = here.run("plan", [f"target={folder}", f"output={tmp_path}"])
    assert code == 0
    assert (result_of(output)["hidden_size"], result_of(output)["layers"]) == (HIDDEN, 5)
    told = here.refused("plan", [f"target={tmp_path}", f"output={tmp_path}"], tmp_path)
    assert "config.json" in told


def test_a_model_out_of_reach_asks_for_its_size(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = here.refused("plan", ["target=someone/nobody-has-this", f"output={tmp_path}"], tmp_path)
    assert "target.hidden_size=... and target.num_layers=..." in told
    code, output, errors = here.run(
        "plan", ["target=someone/nobody-has-this", f"output={tmp_path}", "target.hidden_size=2560", "target.num_layers=36"]
    )
    assert (code, errors) == (0, "")
    assert result_of(output)["published"]["bytes_per_token"] == 30_726


def test_the_rate_of_the_last_cache_is_used_where_there_is_one(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "smollm2_135m" / "bundled" / "cache.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"producers": [{"tokens": 3000.0, "seconds": 2.0}, {"tokens": 500.0, "seconds": 1.0}]}))
    _, output, _ = here.run("plan", ["target=smollm2_135m", f"output={tmp_path}"])
    assert result_of(output)["machine"]["measured_tokens_per_second"] == 2000
    assert "ran at 2,000 tokens/s here" in output
    path.write_text(json.dumps({"producers": []}))
    _, output, _ = here.run("plan", ["target=smollm2_135m", f"output={tmp_path}"])
    assert result_of(output)["machine"]["measured_tokens_per_second"] is None


@pytest.mark.parametrize("override", ["plan.rows=0", "plan.supervised_share=1.5", "plan.codecs.raw.context=-1", "plan.colour=red"])
def test_impossible_inputs_are_named(here: Here, tmp_path: Path, override: str) -> None:
    told = here.refused("plan", [f"output={tmp_path}", f"+{override}" if "colour" in override else override], tmp_path)
    assert override.partition("=")[0] in told
