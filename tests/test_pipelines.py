"""Every stage as a person runs it, on a tiny random target: what it leaves behind, what a second run does, and what bad input is told.

One chain of real processes serves most tests; mistakes that are found before anything starts are tried in this process, which saves
imports. Real vLLM, real Ray, a real S3 server.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import ENVIRONMENT, JOBS, Here, Workshop, result_of, run, start, write_rows
from s3_server import S3Server
from tiny_models import write_tiny_model

from actors.ledger import FailedRange, LedgerStatus
from storage.object_store import ObjectStore, StorageSettings

pytestmark = pytest.mark.timeout(900)  # the chain is one fixture: its seconds count for the first test


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("shop")
    write_tiny_model(folder / "tiny llama", "llama")
    write_tiny_model(folder / "other", "llama", seed=1)
    rows: list[dict[str, Any]] = [{"prompt": f"What is {n} plus {n * n % 7}?"} for n in range(16)]
    write_rows(folder / "prompts.jsonl", [*rows, rows[0], {"prompt": "  "}, {"note": "no text"}])
    write_rows(folder / "heldout.jsonl", [{"prompt": f"Name {n} colours."} for n in range(3)])
    return Workshop(folder)


@dataclass(frozen=True)
class Chain:
    shop: Workshop
    results: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def chain(shop: Workshop) -> Chain:
    """All five stages, once."""
    return Chain(shop, {job: run(job, shop.overrides(job))[0] for job in JOBS})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    for name, value in {**ENVIRONMENT, "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    return Here(monkeypatch, capsys)


# What the stages do


def test_prepare_counts_what_it_drops(chain: Chain) -> None:
    result = chain.results["prepare"]
    assert (result["train"], result["heldout"]) == (16, 3)
    assert result["dropped"] == {"duplicate": 1, "empty_turn": 1, "no_known_field": 1}


def test_regenerate_answers_and_counts(chain: Chain) -> None:
    result = chain.results["regenerate"]
    assert result["answered_now"] == 16
    assert result["summary"]["rows"] == 16
    assert result["summary"]["usable"] >= 8, "the tiny target's answers end by themselves"
    assert result["generated_tokens"] > 0


def test_cache_holds_every_usable_row(chain: Chain) -> None:
    result = chain.results["cache"]
    assert result["cached"] == chain.results["regenerate"]["summary"]["usable"]
    assert result["cached"] + sum(result["skipped"].values()) == result["rows"] == 16
    assert result["failed"] == []
    assert result["bytes_per_token"] == pytest.approx(result["bytes"] / result["tokens"])
    assert len(result["producers"]) == 1


def test_train_leaves_a_drafter_and_its_curve(chain: Chain) -> None:
    result, folder = chain.results["train"], chain.shop.stored / "runs" / "first"
    assert result["steps_now"] == 6
    assert result["manifest"] == chain.results["cache"]["manifest"]
    assert result["metrics"]["loss"] > 0
    assert result["metrics"]["heldout/tau_teacher_forced"] >= 1
    assert {path.name for path in (folder / "drafter").iterdir()} == {"model.safetensors", "config.json", "contract.json"}
    for figure in ("training.png", "heldout.png"):
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
    assert any((folder / "wandb").glob("offline-run-*")), "W&B keeps an offline run and asks nobody"


def test_evaluate_measures_and_reports(chain: Chain) -> None:
    result = chain.results["evaluate"]
    metrics = result["metrics"]["first"]
    assert 1 <= metrics["tau"] <= 4
    assert {"accept_cond@1", "accept_prefix@1", "accept_prefix@3"} <= metrics.keys()
    assert result["wall_clock_ratio"] > 0
    assert result["differing_texts"] == 0, "float32 at temperature 0: the target's own text"
    page = Path(result["report"])
    assert "tiny_llama" in page.read_text()
    assert page.with_name("report.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_finds_everything_done(chain: Chain, here: Here) -> None:
    weights = chain.shop.stored / "runs" / "first" / "drafter" / "model.safetensors"
    before = weights.read_bytes()
    results = {}
    for job in JOBS:
        code, output, errors = here.run(job, chain.shop.overrides(job))
        assert code == 0, errors
        results[job] = result_of(output)
    assert results["regenerate"]["answered_now"] == 0
    assert results["cache"]["producers"] == []
    assert results["cache"]["manifest"] == chain.results["cache"]["manifest"]
    assert results["train"]["steps_now"] == 0
    assert results["evaluate"]["counts"] == chain.results["evaluate"]["counts"]
    assert results["evaluate"]["wall_clock_ratio"] == chain.results["evaluate"]["wall_clock_ratio"]
    assert weights.read_bytes() == before


def test_cache_by_transformers_and_training_on_s3(chain: Chain, s3: S3Server, tmp_path: Path) -> None:
    local = ObjectStore(StorageSettings(str(chain.shop.output)))
    remote = s3.store("pipelines")
    for key in local.list("tiny_llama/jsonl/answers/"):
        remote.put(key, local.get(key))
    on_s3 = ["storage=s3", f"storage.root={remote.settings.root}", f"storage.endpoint_url={s3.endpoint_url}", f"output={tmp_path}"]
    cached, _ = run("cache", chain.shop.overrides("cache", *on_s3, "producer.engine=hf"))
    assert (cached["cached"], cached["skipped"]) == (chain.results["cache"]["cached"], chain.results["cache"]["skipped"])
    trained, _ = run("train", chain.shop.overrides("train", *on_s3, "tracking=none", "train.steps=3"))
    assert trained["steps_now"] == 3
    assert trained["drafter"].startswith("s3://")
    assert remote.exists("tiny_llama/jsonl/runs/first/drafter/model.safetensors")
    assert not list(tmp_path.rglob("*.arrow")), "no part of the cache on the local disk"


def test_rows_that_failed_are_told_and_end_the_job_with_1(chain: Chain, here: Here, tmp_path: Path) -> None:
    shop = copied(chain.shop, tmp_path)
    for path in [*(shop.stored / "cache" / "commits").iterdir(), *(shop.stored / "cache").glob("manifest-*")]:
        path.unlink()
    status = LedgerStatus(16, 13, 13, 0, 400, 10_000, failed=(FailedRange(4, 7, "its producer died: killed"),))
    here.patch.setattr("pipelines.cache.cluster", lambda settings: nullcontext())
    here.patch.setattr("pipelines.cache.run_cache", lambda *given: (status, []))
    code, output, errors = here.run("cache", shop.overrides("cache", f"target={chain.shop.folder / 'tiny llama'}"))
    assert code == 1, errors
    assert "rows 4-6: its producer died: killed" in " ".join(output.split())
    assert result_of(output)["failed"] == [{"start": 4, "stop": 7, "reason": "its producer died: killed"}]


def test_stat_says_what_is_in_the_cache(chain: Chain, here: Here) -> None:
    code, output, errors = here.run("cache", chain.shop.overrides("cache", "mode=stat"))
    assert (code, errors) == (0, "")
    result, built = result_of(output), chain.results["cache"]
    for ours, theirs in (("rows", "cached"), ("tokens", "tokens"), ("bytes", "bytes"), ("manifest", "manifest"), ("skipped", "skipped")):
        assert result[ours] == built[theirs]
    assert result["published_bytes_per_token"] == 12 * 128 + 6
    assert sum(found["rows"] for found in result["lengths"]) == built["cached"]
    assert sum(result["column_bytes_per_token"].values()) == pytest.approx(result["bytes_per_token"], rel=0.1)


def test_verify_recomputes_rows_by_another_engine_and_finds_damage(chain: Chain, here: Here, tmp_path: Path) -> None:
    result, _ = run("cache", [*chain.shop.overrides("cache", "producer.engine=hf", "upkeep.verify_rows=6"), "--verify"])
    assert result["problems"] == []
    assert result["samples"] == chain.results["cache"]["cached"]
    assert len(result["recomputed"]) == 6
    broken = copied(chain.shop, tmp_path)
    shard = next((broken.stored / "cache" / "shards").iterdir())
    os.truncate(shard, shard.stat().st_size - 8)
    overrides = broken.overrides("cache", "mode=verify", "upkeep.verify_rows=0", f"target={chain.shop.folder / 'tiny llama'}")
    code, output, errors = here.run("cache", overrides)
    assert code == 1
    assert [line for line in errors.splitlines() if line.startswith("error: ") and shard.name in line and "truncated" in line]
    assert len(result_of(output)["problems"]) == 1
    overrides = chain.shop.overrides("cache", "mode=verify", "target.name=tiny_llama", target="other")
    code, output, errors = here.run("cache", overrides)
    assert code == 1
    assert "contract: target.weights_fingerprint is" in errors


def test_gc_removes_only_what_is_old_and_uncommitted(chain: Chain, here: Here, tmp_path: Path) -> None:
    shop = copied(chain.shop, tmp_path)
    shards = shop.stored / "cache" / "shards"
    committed = {path.name for path in shards.iterdir()}
    for name in ("old", "new"):
        (shards / f"{name}.arrow").write_bytes(b"left by a producer that died")
    os.utime(shards / "old.arrow", (1e9, 1e9))
    code, output, _ = here.run("cache", shop.overrides("cache", "mode=gc", f"target={chain.shop.folder / 'tiny llama'}"))
    assert code == 0
    assert (result_of(output)["removed"], result_of(output)["kept"]) == (["shards/old.arrow"], ["shards/new.arrow"])
    assert {path.name for path in shards.iterdir()} == {*committed, "new.arrow"}


@pytest.mark.parametrize("mode", ["stat", "verify", "gc"])
def test_there_must_be_a_cache_to_look_after(chain: Chain, here: Here, tmp_path: Path, mode: str) -> None:
    told = here.refused("cache", chain.shop.overrides("cache", f"mode={mode}", f"output={tmp_path}"), tmp_path)
    assert "not a target cache" in told


@pytest.mark.slow
def test_train_follows_a_cache_and_says_what_it_needs(chain: Chain, here: Here) -> None:
    told = here.refused(
        "train", chain.shop.overrides("train", "train.follow=true", "train.steps=null", "train.epochs=2"), chain.shop.stored
    )
    assert "train.steps" in told
    disk = chain.shop.folder / "node"
    follow = ["run.name=followed", "train.follow=true", "train.disk_cache_gib=0.1", f"train.disk_cache={disk}", "tracking=none"]
    result, _ = run("train", chain.shop.overrides("train", *follow))
    assert result["steps_now"] == 6
    assert (chain.shop.stored / "runs" / "followed" / "follow" / "00000000.json").is_file()
    assert len(list(disk.glob("[0-9a-f]*"))) > 6
    # The same samples in the same order as the run that began with the whole cache.
    first = chain.shop.stored / "runs" / "first" / "drafter" / "model.safetensors"
    assert (chain.shop.stored / "runs" / "followed" / "drafter" / "model.safetensors").read_bytes() == first.read_bytes()


@pytest.mark.parametrize("job", [*JOBS, "doctor", "demo", "plan"])
def test_help_says_what_the_job_does_and_what_can_be_set(job: str, here: Here) -> None:
    code, output, errors = here.run(job, ["--help"])
    assert (code, errors) == (0, "")
    usage, paragraph = output.split("\n\n")[:2]
    assert usage.startswith(f"python -m pipelines.{job}")
    assert len(paragraph) > 100
    assert "Example: python -m" in output
    assert "\noutput: " in output
    assert "Hydra" not in output
    assert all(len(line) <= 140 for line in output.splitlines())


# Bad input


def test_unknown_target(shop: Workshop, here: Here) -> None:
    told = here.refused("cache", ["target=qwen3-8c", f"output={shop.output}"], shop.folder)
    assert "Did you mean qwen3_8b" in told
    told = here.refused("evaluate", ["target=/no/such/folder"], shop.folder)
    assert "/no/such/folder" in told


def test_a_folder_that_is_no_model(chain: Chain, here: Here) -> None:
    told = here.refused("cache", chain.shop.overrides("cache", f"target.model={chain.shop.output}"), chain.shop.stored)
    assert "config.json" in told


@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "holds no rows"), ([{"note": "x"}, {"prompt": ""}], "none of the 2 rows"), (None, "no prompt file")],
)
def test_prompt_files_without_a_usable_row(
    shop: Workshop, here: Here, tmp_path: Path, rows: list[dict[str, Any]] | None, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    if rows is not None:
        write_rows(path, rows)
    told = here.refused("prepare", shop.overrides("prepare", f"corpus.train={path}", f"output={tmp_path / 'out'}"), tmp_path)
    assert words in told
    assert str(path) in told


@pytest.mark.parametrize("job", JOBS)
def test_unwritable_output(shop: Workshop, here: Here, tmp_path: Path, job: str) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    told = here.refused(job, shop.overrides(job, f"output='{blocked / 'out'}'"), tmp_path)
    assert "cannot write" in told
    assert str(blocked) in told


def test_unwritable_results_are_found_before_work_on_s3(shop: Workshop, s3: S3Server, here: Here, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    on_s3 = ["storage=s3", "storage.root=s3://cache/blocked", f"storage.endpoint_url={s3.endpoint_url}", f"output={blocked}/out"]
    assert "output=" in here.refused("prepare", shop.overrides("prepare", *on_s3))
    assert s3.store("blocked").list() == []


def test_s3_without_credentials(shop: Workshop, s3: S3Server, here: Here, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        here.patch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        here.patch.setenv(name, str(tmp_path / "none"))
    on_s3 = ["storage=s3", "storage.root=s3://cache/x", f"storage.endpoint_url={s3.endpoint_url}", f"output={tmp_path / 'out'}"]
    told = here.refused("prepare", shop.overrides("prepare", *on_s3))
    assert "no S3 credentials" in told
    assert "AWS_ACCESS_KEY_ID" in told


def test_s3_with_wrong_credentials_or_out_of_reach(shop: Workshop, s3: S3Server, here: Here, tmp_path: Path) -> None:
    on_s3 = ["storage=s3", "storage.root=s3://cache/x", f"output={tmp_path / 'out'}"]
    told = here.refused("prepare", shop.overrides("prepare", *on_s3, "storage.endpoint_url=http://127.0.0.1:9"))
    assert "http://127.0.0.1:9" in told
    assert "reachable" in told
    here.patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    told = here.refused("prepare", shop.overrides("prepare", *on_s3, f"storage.endpoint_url={s3.endpoint_url}"))
    assert "refused" in told


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("regenerate", "python -m pipelines.prepare"),
        ("cache", "python -m pipelines.regenerate"),
        ("train", "make cache"),
        ("evaluate", "python -m pipelines.prepare"),
    ],
)
def test_stages_out_of_turn_name_the_one_before(shop: Workshop, here: Here, tmp_path: Path, job: str, words: str) -> None:
    told = here.refused(job, shop.overrides(job, f"output={tmp_path}"), tmp_path)
    assert words in told


def test_evaluate_before_train(chain: Chain, here: Here) -> None:
    told = here.refused("evaluate", chain.shop.overrides("evaluate", "run=second"), chain.shop.stored)
    assert "runs/second" in told
    assert "python -m pipelines.train" in told


@pytest.mark.parametrize(
    ("job", "override", "words"),
    [
        ("regenerate", "target.sampling.temperature=0.5", ["sampling", "0.5"]),
        ("regenerate", "generator.max_length=96", ["max_length", "128", "96"]),
        ("cache", "cache.max_length=96", ["capture.max_length", "128", "96"]),
        ("cache", "cache.codec=raw", ["capture.codec", "lossless", "raw"]),
        ("cache", "target.layer_ids=[1,3]", ["capture.layer_ids"]),
        ("cache", "target.mask_token=7", ["capture.mask_token_id", "318", "7"]),
        ("train", "target.layer_ids=[1,3]", ["layers", "[1, 3]", "target.layer_ids=[1, 2, 3, 4, 5]"]),
        ("train", "target.mask_token=7", ["mask token 318", "this run's, 7", "target.mask_token=318"]),
        ("train", "train.anchors=5", ["settings.anchors", "there 4, now 5", "run.name"]),
        ("train", "drafter.head_rank=4", ["drafter.head_rank", "there 8, now 4"]),
        ("train", "train.steps=7", ["settings.steps"]),
        ("train", "train.heldout_rows=100", ["train.heldout_rows=100"]),
        ("train", "train.global_batch=99", ["train.global_batch=99"]),
        ("evaluate", "target.mask_token=7", ["mask token 318", "target.mask_token=318"]),
    ],
)
def test_settings_that_differ_from_what_is_there_are_named(chain: Chain, here: Here, job: str, override: str, words: list[str]) -> None:
    told = here.refused(job, chain.shop.overrides(job, override), chain.shop.stored)
    for word in words:
        assert word in told


@pytest.mark.parametrize("job", ["regenerate", "cache", "train", "evaluate"])
def test_another_target_under_the_same_name_is_refused(chain: Chain, here: Here, job: str) -> None:
    overrides = chain.shop.overrides(job, "target.name=tiny_llama", target="other")
    told = here.refused(job, overrides, chain.shop.stored)
    assert "target" in told
    assert ("weights_fingerprint" in told) or job == "regenerate"


@pytest.mark.parametrize("overrides", [["+colour=red", "target.sampling.temperature=hot", "+target.size=8"]])
def test_every_mistake_in_the_config_in_one_line(shop: Workshop, here: Here, overrides: list[str]) -> None:
    told = here.refused("train", shop.overrides("train", *overrides))
    for name in ("colour", "target.sampling.temperature", "target.size"):
        assert name in told


def copied(shop: Workshop, folder: Path) -> Workshop:
    """The chain's storage in a folder of its own, to be damaged."""
    shutil.copytree(shop.output, folder / "out", ignore=shutil.ignore_patterns("runs"))
    for name in ("tiny llama", "prompts.jsonl", "heldout.jsonl"):
        (folder / name).symlink_to(shop.folder / name)
    return Workshop(folder)


def test_a_truncated_shard_stops_training_with_shard_and_row(chain: Chain, tmp_path: Path) -> None:
    broken = copied(chain.shop, tmp_path)
    shards = list((broken.stored / "cache" / "shards").iterdir())
    for shard in shards:
        os.truncate(shard, 200)
    overrides = broken.overrides("train", "tracking=none", f"target={chain.shop.folder / 'tiny llama'}")
    process = start("train", overrides)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 2, errors
    assert "result:" not in output
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert any(shard.name in told[0] for shard in shards)
    assert "row" in told[0]
    assert "Traceback" not in errors
    assert len(errors.splitlines()) < 12
    assert not (broken.stored / "runs" / "first" / "drafter").exists()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def interruptible() -> dict[str, Any]:
    """A process group of its own, with Ctrl-C as a terminal gives it: to the whole group, and not ignored as in the background."""
    return {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}


def test_ctrl_c_ends_training_without_a_traceback(chain: Chain, interruptible: dict[str, Any]) -> None:
    claimed = chain.shop.stored / "runs" / "stopped" / "run.json"
    process = start("train", chain.shop.overrides("train", "run.name=stopped", "train.steps=100000"), **interruptible)
    wait_for(claimed.is_file, process)
    time.sleep(4)  # into the start of Ray and its workers
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("stopped: run the same command again")
    assert "result:" not in output
