"""Runs vLLM engines in a process of their own: vLLM keeps global state and wants its environment set before it is imported."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from actors.engines.base import AnswerSettings, Captured, EngineSettings
from actors.engines.make import make_engine
from actors.engines.vllm import vllm_environment

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Job:
    """One engine, and the batches it is given one after another."""

    settings: EngineSettings
    calls: Sequence[Rows]
    asks: Rows = ()  # prompts to be answered and captured in one pass, in one call


def capture(jobs: dict[str, Job], folder: Path) -> dict[str, list[list[Captured]]]:
    """Run every job in one fresh process, engine after engine; returns each call's captured rows, in the order given."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {name: {"settings": asdict(job.settings), "calls": job.calls, "asks": job.asks} for name, job in jobs.items()}
    (folder / "plan.json").write_text(json.dumps(plan))
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, **vllm_environment(next(iter(jobs.values())).settings), "PYTHONPATH": root}
    done = subprocess.run([sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the engines' process ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    captured: dict[str, list[list[Captured]]] = {}
    for name, job in jobs.items():
        found = load_file(folder / f"{name}.safetensors")
        captured[name] = [
            [Captured(found[f"{call}.{row}.context"], found[f"{call}.{row}.last"]) for row in range(len(rows))]
            for call, rows in enumerate(job.calls)
        ]
    return captured


def answered(name: str, job: Job, folder: Path) -> list[tuple[list[int], Captured]]:
    """What `capture` left of a job's asks: each prompt's answer and the states of prompt and answer."""
    found = load_file(folder / f"{name}.safetensors")
    return [(found[f"ask.{n}.ids"].tolist(), Captured(found[f"ask.{n}.context"], found[f"ask.{n}.last"])) for n in range(len(job.asks))]


def main(folder: Path) -> None:
    """The process: do what `capture` planned."""
    for name, job in json.loads((folder / "plan.json").read_text()).items():
        job["settings"]["layer_ids"] = tuple(job["settings"]["layer_ids"])
        if job["settings"]["answers"]:
            job["settings"]["answers"] = AnswerSettings(**job["settings"]["answers"])
        engine = make_engine(EngineSettings(**job["settings"]))
        tensors = {}
        for call, rows in enumerate(job["calls"]):
            for row, states in enumerate(engine.prefill(rows)):
                tensors[f"{call}.{row}.context"] = states.context.contiguous()
                tensors[f"{call}.{row}.last"] = states.last_hidden.contiguous()
        for n, answer, states in engine.answer(job["asks"]) if job["asks"] else ():
            tensors[f"ask.{n}.ids"] = torch.tensor(answer.token_ids)
            tensors[f"ask.{n}.context"] = states.context.contiguous()
            tensors[f"ask.{n}.last"] = states.last_hidden.contiguous()
        save_file(tensors, folder / f"{name}.safetensors")
        del engine
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
