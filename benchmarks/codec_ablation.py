"""Whether fp8 context costs accepted length: the same training from a raw and from an fp8 cache of the same states, over several seeds.

    python benchmarks/codec_ablation.py --demo outputs/demo --seeds 0 1 2

Writes the cache that `make demo` left behind anew in each codec, trains the demo's drafter from each, and compares what the held-out rows
say at the end. Rows, held-out rows, budget and the drafter's first weights are the same; the order of the samples is not, since it follows
from the cache's hash: that is part of the noise that the seeds show. A row is in the results as soon as its training ends; run the same
command again for those that are missing. `--minutes` bounds how long new ones are begun.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.job import write_json
from storage.codec import CODECS
from storage.commits import commit_key, read_commits, write_commit
from storage.contract import Contract, ensure_contract, load_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places
from storage.shard import ShardWriter, encode_sample, read_sample

PLACES = Places("smollm2_135m", "bundled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo"), help="output folder of `make demo`")
    parser.add_argument("--work", type=Path, default=Path("outputs/codec_ablation"), help="where the caches and runs are kept")
    parser.add_argument("--codecs", nargs="+", default=["raw", "fp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="of the demo's batch")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so long no further training is begun")
    parser.add_argument("--side-by-side", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codec_ablation.json"))
    args = parser.parse_args()
    source = ObjectStore(StorageSettings(str(args.demo))).child(PLACES.cache)
    for codec in args.codecs:
        transcode(source, ObjectStore(StorageSettings(str(args.work / codec))).child(PLACES.cache), codec)
    results = Results(args.out, args.steps)
    # Pairs of one seed run side by side: what disturbs the machine disturbs both.
    runs = [(codec, seed) for seed in args.seeds for codec in args.codecs if not results.has(codec, seed)]
    last_start = time.monotonic() + 60 * args.minutes

    def run(codec: str, seed: int) -> None:
        if time.monotonic() < last_start:
            results.add(train(args, codec, seed))

    with ThreadPoolExecutor(args.side_by_side) as pool:
        for future in [pool.submit(run, *each) for each in runs]:
            future.result()
    print(table(results.rows))
    missing = sum(not results.has(codec, seed) for seed in args.seeds for codec in args.codecs)
    if missing:
        print(f"{missing} trainings are missing: run the same command again")


class Results:
    """The rows on disk, of trainings of `steps` steps; those of another length are left out."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps, self._lock = path, steps, threading.Lock()
        stored = json.loads(path.read_text()) if path.is_file() else {"steps": steps, "rows": []}
        self.rows: list[dict[str, Any]] = stored["rows"] if stored["steps"] == steps else []

    def has(self, codec: str, seed: int) -> bool:
        return any((row["codec"], row["seed"]) == (codec, seed) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows = sorted([*self.rows, row], key=lambda row: (row["seed"], CODECS.index(row["codec"])))
            write_json(self._path, {"steps": self._steps, "rows": self.rows})


def with_codec(contract: Contract, codec: str) -> Contract:
    """The contract of the same states in another codec."""
    return replace(contract, capture=replace(contract.capture, codec=codec))


def transcode(source: ObjectStore, destination: ObjectStore, codec: str) -> None:
    """Write a cache anew in another codec: the same leases, rows and states. What is there already stays."""
    contract = load_contract(source)
    other = with_codec(contract, codec)
    ensure_contract(destination, other)
    for commit in read_commits(source):
        if destination.exists(commit_key(commit.lease_id)):
            continue
        with ShardWriter(destination, other) as writer:
            for shard in commit.shards:
                for entry in shard.entries:
                    sample = read_sample(source, shard.name, entry, contract)
                    writer.add(encode_sample(sample, other), entry.row_id, entry.index)
            shards = writer.close()
        write_commit(destination, replace(commit, shards=tuple(shards)))
    Manifest.current(destination).save(destination)


def train(args: argparse.Namespace, codec: str, seed: int) -> dict[str, Any]:
    name = f"{codec}-{args.steps}-seed{seed}"
    overrides = [f"output={args.work / codec}", "+experiment=dspark_markov", f"train.seed={seed}", f"train.steps={args.steps}"]
    overrides += [f"run.name={name}", "workers.cpus=1", "cluster.cpus=1", "tracking=none"]
    command = [sys.executable, "-m", "pipelines.train", *overrides]
    with (args.work / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.STDOUT, stdout=log)
    metrics = json.loads((args.work / codec / PLACES.run(name) / "train.json").read_text())["metrics"]
    row: dict[str, Any] = {
        "codec": codec,
        "seed": seed,
        "tau_teacher_forced": metrics["heldout/tau_teacher_forced"],
        "one_minus_tv": {key.rpartition("@")[2]: value for key, value in metrics.items() if key.startswith("heldout/one_minus_tv@")},
    }
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a codec a line, its figure for each seed, mean, and the mean difference to the first codec at the same seed."""
    first = {row["seed"]: row["tau_teacher_forced"] for row in rows if row["codec"] == rows[0]["codec"]} if rows else {}
    lines = [
        "| codec | tau_teacher_forced by seed | mean | difference at the same seed | one_minus_tv@k, mean |",
        "| --- | --- | --- | --- | --- |",
    ]
    for codec in dict.fromkeys(row["codec"] for row in rows):
        own = [row for row in rows if row["codec"] == codec]
        taus = [row["tau_teacher_forced"] for row in own]
        gaps = [row["tau_teacher_forced"] - first[row["seed"]] for row in own if row["seed"] in first] or [math.nan]
        each = [statistics.mean(row["one_minus_tv"][k] for row in own) for k in sorted(own[0]["one_minus_tv"], key=int)]
        lines.append(
            f"| {codec} | {' '.join(f'{tau:.3f}' for tau in taus)} | {statistics.mean(taus):.3f} "
            f"| {statistics.mean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f}) | {' '.join(f'{value:.3f}' for value in each)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
