"""Whether fp8 context costs accepted length: the same training from a raw and from an fp8 cache of the same states, over several seeds.

    python benchmarks/codec_ablation.py --output outputs/demo --seeds 0 1 2

Writes the cache that `make demo` left behind anew in each codec, trains DSpark with a Markov head from each, and compares what held-out
rows say at the end, and the accepted length at temperature 0. Rows, held-out rows, budget and first weights are the same; the order of the
samples is not, since it follows from the cache's hash: that is part of the noise that the seeds show. A row is in the results once its
training has been measured; run the same command again for those that are missing. `--minutes` bounds how long new ones are begun.
"""

import argparse
import json
import math
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare_drafters import measure, train

from pipelines.job import write_json
from pipelines.target import load_target_config
from storage.codec import CODECS
from storage.commits import commit_key, read_commits, write_commit
from storage.contract import Contract, ensure_contract, load_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places
from storage.shard import ShardWriter, encode_sample, read_sample

EXPERIMENT = "dspark_markov"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder that holds the cache: `make demo` leaves one")
    parser.add_argument("--corpus", default="bundled")
    parser.add_argument("--work", type=Path, default=Path("outputs/codec_ablation"), help="where the caches and runs are kept")
    parser.add_argument("--codecs", nargs="+", default=["raw", "fp8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="of the demo's batch")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="further options of every training")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts decoded")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so long no further training is begun")
    parser.add_argument("--side-by-side", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codec_ablation.json"))
    args = parser.parse_args()
    source, places = ObjectStore(StorageSettings(str(args.output))), Places("smollm2_135m", args.corpus)
    for codec in args.codecs:
        destination = ObjectStore(StorageSettings(str(args.work / codec)))
        transcode(source.child(places.cache), destination.child(places.cache), codec)
        destination.put(f"{places.prompts}/heldout.jsonl", source.get(f"{places.prompts}/heldout.jsonl"))
    target = load_target_config("smollm2_135m").resolve(print)
    results = Results(args.out, {key: getattr(args, key) for key in ("corpus", "steps", "set", "prompts", "max_new_tokens")})
    # Pairs of one seed run side by side: what disturbs the machine disturbs both.
    runs = [(codec, seed) for seed in args.seeds for codec in args.codecs if not results.has(codec, seed)]
    last_start = time.monotonic() + 60 * args.minutes

    def run(codec: str, seed: int) -> None:
        if time.monotonic() < last_start:
            output, which = args.work / codec, (EXPERIMENT, seed, args.steps)
            train(output, args.corpus, *which, args.set)
            results.add({"codec": codec, **measure(output, args.corpus, target, *which, args.prompts, args.max_new_tokens)})

    with ThreadPoolExecutor(args.side_by_side) as pool:
        for future in [pool.submit(run, *each) for each in runs]:
            future.result()
    print(table(results.rows))
    missing = sum(not results.has(codec, seed) for seed in args.seeds for codec in args.codecs)
    if missing:
        print(f"{missing} trainings are missing: run the same command again")


class Results:
    """The rows on disk, of trainings with these facts; those of others are left out."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path, self._facts, self._lock = path, facts, threading.Lock()
        stored = json.loads(path.read_text()) if path.is_file() else {"rows": []}
        rows = stored.pop("rows")
        self.rows: list[dict[str, Any]] = rows if stored == facts else []

    def has(self, codec: str, seed: int) -> bool:
        return any((row["codec"], row["seed"]) == (codec, seed) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows = sorted([*self.rows, row], key=lambda row: (row["seed"], CODECS.index(row["codec"])))
            write_json(self._path, {**self._facts, "rows": self.rows})


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


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a codec a line; each figure by seed, its mean, and the mean difference to the first codec at the same seed."""
    lines = ["| codec | tau by seed | difference | tau_teacher_forced by seed | difference | one_minus_tv@k, mean |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for codec in dict.fromkeys(row["codec"] for row in rows):
        own = [row for row in rows if row["codec"] == codec]
        each = " ".join(f"{statistics.mean(values):.3f}" for values in zip(*(row["one_minus_tv"] for row in own), strict=True))
        lines.append(f"| {codec} | {_compared(rows, own, 'tau')} | {_compared(rows, own, 'heldout_tau_teacher_forced')} | {each} |")
    return "\n".join(lines)


def _compared(rows: list[dict[str, Any]], own: list[dict[str, Any]], key: str) -> str:
    first = {row["seed"]: row[key] for row in rows if row["codec"] == rows[0]["codec"]}
    values = [row[key] for row in own]
    gaps = [row[key] - first[row["seed"]] for row in own if row["seed"] in first] or [math.nan]
    told = f"{' '.join(f'{value:.3f}' for value in values)}, mean {statistics.mean(values):.3f}"
    return f"{told} | {statistics.mean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})"


if __name__ == "__main__":
    main()
