"""Drafters trained on an equal budget of samples, over seeds: teacher-forced acceptance, and accepted length when they draft.

    python benchmarks/compare_drafters.py --output outputs/demo --experiments dspark_markov dspark_rank0 dflash --seeds 0 1 2
    make drafters                                              # a corpus, its cache, and the five algorithms, from nothing

Trains each with `pipelines.train` on one cache (all on the same samples), then decodes held-out prompts at temperature 0. Finished runs are
not repeated. Two trainings of one thread each run side by side. Writes one JSON row a drafter, a figure, and a table.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from actors.drafter import build_drafter
from decoding.loop import speculative_decode
from decoding.metrics import acceptance_metrics, divide
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget
from drafters.config import DrafterConfig
from pipelines.figures import MARKERS, SERIES, save
from pipelines.job import write_json
from pipelines.prepare import read_conversations
from pipelines.target import Target, load_target_config
from storage.checkpoint import load_drafter
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder that holds the cache: `make demo` leaves one")
    parser.add_argument("--corpus", default="bundled")
    parser.add_argument("--experiments", nargs="+", default=["dspark_markov", "dspark_rank0", "dflash"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="of the demo's batch; the default is its own budget")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="further options of every training")
    parser.add_argument("--side-by-side", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, help="held-out prompts decoded; all by default")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compare_heads.json"), help="the figure lies beside it")
    args = parser.parse_args()
    runs = [(experiment, seed) for seed in args.seeds for experiment in args.experiments]
    with ThreadPoolExecutor(args.side_by_side) as pool:
        list(pool.map(lambda run: train(args.output, args.corpus, *run, args.steps, args.set), runs))
    target = load_target_config("smollm2_135m").resolve(print)
    rows = [measure(args.output, args.corpus, target, *run, args.steps, args.prompts, args.max_new_tokens) for run in runs]
    facts = {key: getattr(args, key) for key in ("corpus", "steps", "set", "prompts", "max_new_tokens")}
    write_json(args.out, {**facts, "temperature": 0, "rows": rows})
    save(by_position(rows), args.out.with_suffix(".png"))
    print(table(rows))


def name(experiment: str, seed: int, steps: int) -> str:
    return f"{experiment}-{steps}-seed{seed}"


def train(output: Path, corpus: str, experiment: str, seed: int, steps: int, options: Sequence[str]) -> None:
    """The demo's training with another drafter, corpus, seed or length, on one thread. A finished one is not repeated."""
    overrides = [f"output={output}", f"corpus.name={corpus}", f"+experiment={experiment}", f"train.seed={seed}"]
    overrides += [f"train.steps={steps}", f"run.name={name(experiment, seed, steps)}", *options]
    if experiment == "mtp1":
        overrides = [each for each in overrides if not each.startswith("drafter.block_length=")]  # it drafts one token
    command = [sys.executable, "-m", "pipelines.train", *overrides, "workers.cpus=1", "cluster.cpus=1", "tracking=none"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


def measure(
    output: Path, corpus: str, target: Target, experiment: str, seed: int, steps: int, count: int | None, max_new_tokens: int
) -> dict[str, Any]:
    """Greedy accepted length over `count` held-out prompts, and what the training said of itself."""
    store, places = ObjectStore(StorageSettings(str(output))), Places(target.config.name, corpus)
    run = places.run(name(experiment, seed, steps))
    files = load_drafter(store.child(f"{run}/drafter"))
    drafter = build_drafter(str(target.folder), DrafterConfig.from_dict(files.config), "bfloat16")
    drafter.load_trainable(files.tensors)
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.bfloat16)
    heldout = read_conversations(store.child(places.prompts), "heldout")
    prompts = [target.template.prompt_ids(c.rounds()[0]) for c in sorted(heldout, key=lambda c: c.id)[:count]]
    settings = SamplingSettings(0.0, max_new_tokens, target.template.stop_ids)
    decoder = TransformersTarget.for_drafter(model, files.contract.capture.layer_ids, drafter.config)
    shown = divide(acceptance_metrics(speculative_decode(decoder, drafter.eval(), prompts, settings, batch_size=16)))
    trained = json.loads((output / run / "train.json").read_text())
    row = {
        "experiment": experiment,
        "seed": seed,
        "tau": shown["tau"],
        "tau_per_request": shown["tau_per_request"],
        "accept_cond": [shown.get(f"accept_cond@{k}") for k in range(1, drafter.config.block_length + 1)],
        "one_minus_tv": [trained["metrics"].get(f"heldout/one_minus_tv@{k}") for k in range(1, drafter.config.block_length + 1)],
        "heldout_tau_teacher_forced": trained["metrics"]["heldout/tau_teacher_forced"],
        "samples": trained["settings"]["steps"] * trained["settings"]["global_batch"],
        "train_seconds": trained["seconds"],
    }
    print(json.dumps(row), flush=True)
    return row


def by_position(rows: list[dict[str, Any]]) -> Figure:
    """Teacher-forced acceptance by position, mean and range over seeds (in the style of the paper's Figure 2)."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, experiment in enumerate(dict.fromkeys(row["experiment"] for row in rows)):
        curves = np.array([row["one_minus_tv"] for row in rows if row["experiment"] == experiment], dtype=float)
        positions, colour = np.arange(1, curves.shape[1] + 1), SERIES[number % len(SERIES)]
        axes.plot(positions, curves.mean(0), marker=MARKERS[number % len(MARKERS)], color=colour, label=experiment)
        axes.fill_between(positions, curves.min(0), curves.max(0), color=colour, alpha=0.15)
    axes.set(xlabel="draft position k", ylabel="one_minus_tv@k, held-out rows", ylim=(0, None))
    axes.grid(axis="y", alpha=0.4)
    axes.legend(frameon=False)
    return figure


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean and range over seeds."""
    lines = [
        "| drafter | tau by seed | mean (min to max) | accept_cond@k, mean | teacher-forced tau at temperature 1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        own = [row for row in rows if row["experiment"] == experiment]
        taus = [row["tau"] for row in own]
        # A position that no round of some seed reached has no figure there.
        reached = [[value for value in values if value is not None] for values in zip(*(row["accept_cond"] for row in own), strict=True)]
        cond = [f"{statistics.mean(values):.2f}" if values else "-" for values in reached]
        forced = [row["heldout_tau_teacher_forced"] for row in own]
        lines.append(
            f"| {experiment} | {' '.join(f'{tau:.2f}' for tau in taus)} | {statistics.mean(taus):.2f} ({min(taus):.2f} to {max(taus):.2f}) "
            f"| {' '.join(cond)} | {statistics.mean(forced):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
