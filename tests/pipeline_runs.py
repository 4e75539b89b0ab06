"""Running stages as a person does, on a tiny random target: as processes, or inside the test's own."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hydra.core.global_hydra import GlobalHydra
from storage_cases import hidden_states
from tiny_models import HIDDEN, VOCABULARY

from pipelines.job import launch
from storage.commits import Commit, lease_id, write_commit
from storage.contract import Capture, Contract, ensure_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.sample import Sample, supervised_rows
from storage.shard import ShardWriter, encode_sample
from storage.target_files import target_identity

ROOT = Path(__file__).parent.parent
LAYER_IDS, ROWS = (1, 2, 3, 4, 5), 12  # of a cache written by hand
JOBS = ("prepare", "regenerate", "cache", "train", "evaluate")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
OPTIONS = {
    "prepare": [],
    "regenerate": [
        "cluster.cpus=1",
        "generator.actors=1",
        "generator.max_length=128",
        "target.sampling.max_new_tokens=48",
        "target.sampling.temperature=1.0",
    ],
    "cache": ["cluster.cpus=1", "producer.count=1", "cache.max_length=128", "lease.rows=8"],
    "train": [
        "cluster.cpus=1",
        "run.name=first",
        "train.steps=6",
        "train.epochs=null",
        "train.global_batch=2",
        "train.micro_batch=2",
        "train.anchors=4",
        "train.heldout_rows=2",
        "train.log_every=2",
        "train.score_every=6",
        "train.checkpoint_every=3",
        "train.compute=float32",
        "train.reader_threads=1",
        "train.prefetch_mib=8",
        "drafter.num_layers=1",
        "drafter.block_length=3",
        "drafter.head_rank=8",
    ],
    "evaluate": [
        "cluster.cpus=1",
        "run=first",
        "evaluate.temperature=0",
        "evaluate.max_new_tokens=12",
        "evaluate.dtype=float32",
        "evaluate.threads=1",
        "tracking=none",
    ],
}


@dataclass(frozen=True)
class Workshop:
    """A folder with a tiny target, its prompts and the results of the chain."""

    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def stored(self) -> Path:
        """What belongs to this target and corpus."""
        return self.output / "tiny_llama" / "jsonl"

    def overrides(self, job: str, *more: str, target: str = "tiny llama") -> list[str]:
        return [
            f"target={self.folder / target}",
            "corpus=jsonl",
            f"corpus.train={self.folder / 'prompts.jsonl'}",
            f"corpus.heldout={self.folder / 'heldout.jsonl'}",
            f"output={self.output}",
            *OPTIONS[job],
            *more,
        ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_cache(shop: Workshop, rows_kept: Any) -> None:
    """A cache of random states as `cache` leaves it, for the shop's target."""
    model = shop.folder / "tiny llama"
    capture = Capture(layer_ids=LAYER_IDS, max_length=128, codec="raw", last_hidden_rows=rows_kept)
    contract = Contract(target_identity(model, str(model)), capture)
    store = ObjectStore(StorageSettings(str(shop.stored / "cache")))
    ensure_contract(store, contract)
    with ShardWriter(store, contract, 1 << 20) as writer:
        for index in range(ROWS):
            rng = np.random.default_rng(index)
            length = 24 + index
            spans = np.array([[length // 3, length]], np.int32)
            rows = supervised_rows(spans, length, rows_kept)
            ids = rng.integers(0, VOCABULARY - 5, length).astype(np.int32)
            context, last = hidden_states(rng, len(LAYER_IDS), length, HIDDEN), hidden_states(rng, len(rows), HIDDEN)
            writer.add(encode_sample(Sample(f"row-{index}", ids, spans, context, last, rows), contract), f"row-{index}", index)
        shards = writer.close()
    write_commit(store, Commit(lease_id(0, ROWS), 1, 0, ROWS, tuple(shards)))
    Manifest.current(store).save(store)


def start(job: str, overrides: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", f"pipelines.{job}", *overrides]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(job: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Run a stage as a person would; its result file and what it said on stderr."""
    process = start(job, overrides)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) < 12, f"a quiet run, please: {errors}"
    return result_of(output), errors


def killed(job: str, overrides: Sequence[str], watched: Path, files: int, seconds: float) -> bool:
    """Start a job in a session of its own; once it has left so many files more below `watched`, and some seconds later, kill every process
    of it, Ray's too. Whether it was killed before it had finished."""
    process = start(job, overrides, start_new_session=True)
    wanted = _count(watched) + files
    while process.poll() is None and _count(watched) < wanted:
        time.sleep(0.02)
    time.sleep(seconds)
    # Nothing is registered any more from here on, however long it takes to find the others.
    process.send_signal(signal.SIGSTOP)
    running = process.poll() is None
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)] if running else []
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(family, timeout=20)
    return running


def _count(folder: Path) -> int:
    """Finished files: those being written have names that begin with a dot."""
    return sum(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def result_of(output: str) -> dict[str, Any]:
    name, _, path = output.splitlines()[-1].partition(": ")
    assert name == "result"
    return dict(json.loads(Path(path).read_text()))


class Here:
    """Runs a stage inside this process: for what ends before Ray starts."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capture = patch, capture

    def run(self, job: str, overrides: Sequence[str]) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        self.patch.setattr(sys, "argv", [f"pipelines.{job}", *overrides])
        GlobalHydra.instance().clear()
        self.capture.readouterr()
        code = 0
        try:
            launch(importlib.import_module(f"pipelines.{job}").main)
        except SystemExit as end:
            code = int(end.code or 0)
        told = self.capture.readouterr()
        return code, told.out, told.err

    def refused(self, job: str, overrides: Sequence[str], *watched: Path) -> str:
        """The one line that the user is told; asserts that it is one, and that nothing in the watched folders was changed."""
        before = [contents(folder) for folder in watched]
        code, output, errors = self.run(job, overrides)
        lines = errors.splitlines()
        assert code == 2, errors
        assert "result:" not in output
        assert "Traceback" not in errors
        assert [line.startswith("error: ") for line in lines].count(True) == 1
        assert lines[-1].startswith("error: "), errors
        assert [contents(folder) for folder in watched] == before
        return lines[-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
