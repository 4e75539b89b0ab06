"""Sweeps on a tiny random target and a cache written by hand, and how their tests look at them."""

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
from pipeline_runs import Workshop, result_of, write_cache, write_rows
from tiny_models import write_tiny_model

from actors import checkpointing
from actors.trial_record import TrialRecord
from storage.object_store import ObjectStore, StorageSettings

RANKS, BLOCKS = (0, 8), (2, 3)
GRID = [f"sweep.space.drafter.head_rank=[{RANKS[0]},{RANKS[1]}]", f"sweep.space.drafter.block_length=[{BLOCKS[0]},{BLOCKS[1]}]"]
SERVING = ["sweep.serving.requests=2", "sweep.serving.context=16", "sweep.serving.repeats=1", "sweep.serving.dtype=float32"]
NAMES = [f"head_rank{rank}-block_length{block}" for rank, block in itertools.product(RANKS, BLOCKS)]
SET_BY_TRIALS = ("run.name", "drafter.head_rank", "drafter.block_length")


class SweepShop(Workshop):
    """Overrides of a sweep: those of a training but for what trials differ in."""

    def sweep(self, name: str, *more: str) -> list[str]:
        given = [each for each in self.overrides("train") if not each.startswith(SET_BY_TRIALS)]
        steps = ["train.score_every=3", "sweep.refresh_seconds=0.5", "sweep.serving.threads=1"]
        return ["+experiment=rank_by_block", *given, *GRID, *SERVING, *steps, f"sweep.name={name}", *more]

    def folder_of(self, sweep: str) -> Path:
        return self.output / "sweeps" / sweep

    def run_of(self, sweep: str, trial: str) -> Path:
        return self.stored / "runs" / f"{sweep}.{trial}"

    def record(self, sweep: str, trial: str) -> TrialRecord:
        return TrialRecord.read(ObjectStore(StorageSettings(str(self.run_of(sweep, trial)))))

    def step(self, sweep: str, trial: str) -> int:
        """Of the trial's newest checkpoint."""
        return checkpointing.standing_of(ObjectStore(StorageSettings(str(self.run_of(sweep, trial))))).step

    def weights(self, sweep: str, trial: str) -> bytes:
        return (self.run_of(sweep, trial) / "drafter" / "model.safetensors").read_bytes()


def make_sweep_shop(folder: Path) -> SweepShop:
    shop = SweepShop(folder)
    write_tiny_model(shop.folder / "tiny llama", "llama")
    write_rows(shop.folder / "prompts.jsonl", [{"prompt": "What is 1?"}])
    write_rows(shop.folder / "heldout.jsonl", [{"prompt": "Name 2 colours."}])
    write_cache(shop, "supervised")
    return shop


@dataclass(frozen=True)
class Swept:
    shop: SweepShop
    result: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.shop.folder_of("first")

    def trial(self, name: str) -> dict[str, Any]:
        return next(row for row in self.result["trials"] if row["trial"] == name)


def finished(process: "subprocess.Popen[str]", code: int = 0) -> dict[str, Any]:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, errors
    assert "Traceback" not in errors, errors
    return result_of(output)


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 500) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trial_processes(parent: int) -> list[psutil.Process]:
    """Those that trials run in, below a sweep's process or a node's."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ImplicitFunc" in " ".join(child.cmdline()):
                found.append(child)
    return found


class Page(HTMLParser):
    """What a browser would show, ask for and run."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.codes: list[str] = []
        self.text = ""

    @classmethod
    def of(cls, path: Path) -> "Page":
        page = cls()
        page.feed(path.read_text())
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "xlink:href") and not (value or "").startswith("#")
        ]
        if tag == "code":
            self.codes.append("")
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append(dict(attrs).get("data-value") or "")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.codes and not self.codes[-1]:
            self.codes[-1] = data
