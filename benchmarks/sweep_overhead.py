"""What Ray Tune costs: a sweep against the same trials trained one after the other by a bare loop in one process.

    python benchmarks/sweep_overhead.py --output outputs/demo --steps 40 --rounds 2 -- drafter.num_layers=1

Both train the same drafters from the same cache with one thread, each run in a new process whose whole time counts, imports and start of
Ray included; in the order A B, B A, ... The sweep runs one trial at a time and draws its dashboard; predicted speed is left out of both,
since timing a drafter is no part of training it. Works on a local folder that holds a cache; removes the runs that it made.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from actors.cluster import CPU_ENVIRONMENT
from actors.export import export
from actors.trainer import Worker
from pipelines.evaluation_report import machine
from pipelines.job import write_json
from pipelines.sweep_config import SweepJob, grid, trial_config
from pipelines.train_checks import make_recipe
from pipelines.train_config import TrainJob
from storage.manifest import Manifest

CONF = Path(__file__).parent.parent / "conf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder that holds a cache: `make demo` leaves one")
    parser.add_argument("--corpus", default="bundled")
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 64, 256])
    parser.add_argument("--blocks", nargs="+", type=int, default=[3, 5, 7])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sweep_overhead.json"))
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="further options of every training")
    args = parser.parse_args()
    if args.bare:
        bare(overrides(args, args.bare), args.bare)
        return
    rows = []
    for number in range(args.rounds):
        for kind in ("bare", "tune")[:: 1 if number % 2 == 0 else -1]:
            name = f"overhead_{kind}_{os.getpid()}_{number}"
            rows.append({"round": number, "kind": kind, "seconds": timed(args, kind, name), "steps_seconds": steps_seconds(args, name)})
            print(json.dumps(rows[-1]), flush=True)
            remove(args, name)
    seconds = {kind: [row["seconds"] for row in rows if row["kind"] == kind] for kind in ("bare", "tune")}
    ratios = [tune / alone for tune, alone in zip(seconds["tune"], seconds["bare"], strict=True)]
    trials = len(args.ranks) * len(args.blocks)
    facts: dict[str, Any] = {"machine": machine(), "trials": trials, "steps": args.steps, "options": args.options}
    write_json(args.out, {**facts, "rows": rows, "ratios": ratios, "ratio": statistics.median(ratios)})
    print(f"{trials} trials of {args.steps} steps: bare {seconds['bare']}, tune {seconds['tune']}, tune over bare {ratios}")


def overrides(args: argparse.Namespace, name: str) -> list[str]:
    """Options of the sweep, and of the loop."""
    space = [f"sweep.space.drafter.head_rank={args.ranks}", f"sweep.space.drafter.block_length={args.blocks}"]
    given = ["+experiment=rank_by_block", f"output={args.output}", f"corpus.name={args.corpus}", f"sweep.name={name}", *space]
    given += [
        "sweep.serving=null",
        "sweep.concurrency=1",
        "tracking=none",
        "cluster.cpus=1",
        f"train.steps={args.steps}",
        "train.epochs=null",
    ]
    return [each.replace(" ", "") for each in given] + args.options


def timed(args: argparse.Namespace, kind: str, name: str) -> float:
    """Seconds of a new process from its start to its end."""
    command = [sys.executable, "-m", "pipelines.sweep", *overrides(args, name)]
    if kind == "bare":
        command = [sys.executable, __file__, "--bare", name, *sys.argv[1:]]
    environment = {**os.environ, **CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CONF.parent)}
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return seconds


def bare(options: list[str], name: str) -> None:
    """The loop: for each combination a recipe, a worker, the drafter."""
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        cfg = compose("sweep", options)
    job = SweepJob.from_config(cfg)
    store, target = job.open_store(), job.target.resolve(print)
    manifest = Manifest.current(store.child(job.places.cache))
    for point in grid(job.sweep.space):
        training = TrainJob.from_config(trial_config(cfg, point, f"{name}.{point.name}"))
        recipe = make_recipe(training, target, store, manifest)
        started = time.perf_counter()
        Worker(recipe, None, 0, 1).run()
        export(recipe, print)
        recipe.run.put("seconds.json", json.dumps(time.perf_counter() - started).encode())


def runs_of(args: argparse.Namespace, name: str) -> list[Path]:
    return sorted(args.output.glob(f"*/{args.corpus}/runs/{name}.*"))


def steps_seconds(args: argparse.Namespace, name: str) -> float:
    """Seconds within the trials alone."""
    found = 0.0
    for run in runs_of(args, name):
        alone = run / "seconds.json"
        found += json.loads(alone.read_text()) if alone.is_file() else json.loads((run / "trial.json").read_text())["seconds"]
    return found


def remove(args: argparse.Namespace, name: str) -> None:
    for folder in [*runs_of(args, name), args.output / "sweeps" / name]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
