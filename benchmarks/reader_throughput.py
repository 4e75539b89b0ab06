"""Bytes a second of the reader over bare concurrent ranged GETs of the same objects, and how long a trainer waits for data; from local S3.

    python benchmarks/reader_throughput.py --output outputs/demo

Copies the cache that `make demo` left behind to a real S3 server (rclone, started here on this machine), in each codec. Bare: as many
threads as the reader has, each asking for the next sample's range and dropping the bytes. Reader: the same ranges in the same order,
checked and decoded. They take turns (A B A B) in one process. Then `pipelines.train` trains some steps from the same server, and says
itself which share of its time it waited for data.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from codec_ablation import transcode

from pipelines.job import write_json
from storage.contract import load_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.order import ReadingOrder
from storage.places import Places
from storage.reader import SampleReader

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from s3_server import aws_environment, start  # the tests' S3 server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder that holds the cache: `make demo` leaves one")
    parser.add_argument("--corpus", default="bundled")
    parser.add_argument("--codecs", nargs="+", default=["raw", "lossless", "fp8"])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the cache in each measurement")
    parser.add_argument("--steps", type=int, default=40, help="of the training whose data wait is told; 0 leaves it out")
    parser.add_argument(
        "--mib-per-second", type=int, help="what the server sends at most, as over a network; by default what the CPU allows"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/reader_throughput.json"))
    args = parser.parse_args()
    os.environ.update(aws_environment())
    places = Places("smollm2_135m", args.corpus)
    source = ObjectStore(StorageSettings(str(args.output))).child(places.cache)
    with tempfile.TemporaryDirectory() as folder:
        server, process = start(Path(folder), args.mib_per_second)
        try:
            result: dict[str, Any] = {"threads": args.threads, "mib_per_second": args.mib_per_second, "codecs": {}}
            for codec in args.codecs:
                root = server.store(codec)
                transcode(source, root.child(places.cache), codec)
                found = measure(root.child(places.cache), args)
                if args.steps:
                    found["data_wait_share"] = data_wait(root, args, Path(folder) / f"{codec}-results")
                result["codecs"][codec] = found
                print(codec, json.dumps(found), flush=True)
        finally:
            process.terminate()
            process.wait()
    write_json(args.out, result)


def measure(cache: ObjectStore, args: argparse.Namespace) -> dict[str, Any]:
    """Median bytes a second, encoded, of both; the ratio of the medians, and of each round."""
    contract, manifest = load_contract(cache), Manifest.current(cache)
    order = ReadingOrder(manifest, seed=0)
    positions = [int(position) for epoch in range(args.epochs) for position in order.epoch(epoch)]
    entries = [manifest.entry(position) for position in positions]
    speeds: dict[str, list[float]] = {"bare": [], "reader": []}
    for _ in range(args.rounds):
        started = time.perf_counter()
        with ThreadPoolExecutor(args.threads) as pool:
            read = sum(pool.map(lambda pair: len(cache.get_range(pair[0], pair[1].offset, pair[1].length)), entries))
        speeds["bare"].append(read / (time.perf_counter() - started))
        started = time.perf_counter()
        with SampleReader(cache, contract, manifest, args.threads) as reader:
            for _ in reader.stream(positions):
                pass
            speeds["reader"].append(reader.read_bytes / (time.perf_counter() - started))
    median = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "samples": len(positions),
        "mean_sample_bytes": float(manifest.lengths.mean()),
        "bare_bytes_per_second": median["bare"],
        "reader_bytes_per_second": median["reader"],
        "ratio": median["reader"] / median["bare"],
        "ratios": [reader / bare for reader, bare in zip(speeds["reader"], speeds["bare"], strict=True)],
    }


def data_wait(root: ObjectStore, args: argparse.Namespace, results: Path) -> float:
    """Share of the last steps' time in which the demo's training, from this server, waited for data."""
    on_s3 = ["storage=s3", f"storage.root={root.settings.root}", f"storage.endpoint_url={root.settings.endpoint_url}"]
    options = [f"train.steps={args.steps}", f"train.log_every={args.steps // 2}", "train.head_start=random", "tracking=none"]
    command = [
        sys.executable,
        "-m",
        "pipelines.train",
        "+experiment=dspark_markov",
        f"output={results}",
        f"corpus.name={args.corpus}",
        *on_s3,
        *options,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    trained = json.loads(Path(done.stdout.splitlines()[-1].removeprefix("result: ")).read_text())
    return float(trained["metrics"]["data_wait_share"])


if __name__ == "__main__":
    main()
