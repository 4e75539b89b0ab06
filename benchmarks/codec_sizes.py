"""What each codec makes of real hidden states: bytes against bf16 and against the published layout, error, and speed of one thread.

    python benchmarks/codec_sizes.py --output outputs/demo

Reads the rows that `make demo` cached (losslessly, so that they are the engine's own bits) and encodes the same rows in every codec.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from codec_ablation import with_codec

from pipelines.job import write_json
from storage.codec import CODECS, decode_plane, encode_plane, plane_codec
from storage.contract import load_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places
from storage.reader import SampleReader
from storage.sample import Sample
from storage.shard import encode_sample
from storage.upkeep import published_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder that holds the cache: `make demo` leaves one")
    parser.add_argument("--corpus", default="bundled")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codec_sizes.json"))
    args = parser.parse_args()
    cache = ObjectStore(StorageSettings(str(args.output))).child(Places("smollm2_135m", args.corpus).cache)
    contract, manifest = load_contract(cache), Manifest.current(cache)
    assert contract.capture.codec != "fp8", "the rows must be the engine's own bits"
    chosen = np.random.default_rng(0).permutation(len(manifest))[: args.rows]
    with SampleReader(cache, contract, manifest) as reader:
        samples = list(reader.stream(chosen.tolist()))
    tokens = sum(len(sample.input_ids) for sample in samples)
    supervised = sum(int(sample.loss_mask().sum()) for sample in samples)
    published = published_bytes(len(contract.capture.layer_ids), contract.target.hidden_size)
    result: dict[str, Any] = {
        "rows": len(samples),
        "tokens": tokens,
        "supervised_share": supervised / tokens,
        "published_bytes_per_token": published,
        "codecs": {},
    }
    for codec in CODECS:
        stored = sum(pa.ipc.get_record_batch_size(encode_sample(sample, with_codec(contract, codec))) for sample in samples)
        result["codecs"][codec] = {
            "bytes_per_token": stored / tokens,
            "of_published_layout": stored / tokens / published,
            **planes(samples, codec),
        }
        print(codec, json.dumps(result["codecs"][codec]), flush=True)
    write_json(args.out, result)


def planes(samples: list[Sample], codec: str) -> dict[str, float]:
    """Encoded bytes over bf16's for both kinds of plane, the relative error of what comes back, and MB of bf16 a second."""
    encoded, plain, seconds = Counter[str](), Counter[str](), Counter[str]()
    wrong = norm = 0.0
    for sample in samples:
        for kind, plane in [*(("context", plane) for plane in sample.context), ("last_hidden", sample.last_hidden)]:
            own = plane_codec(codec, kind)  # type: ignore[arg-type]
            started = time.perf_counter()
            data = encode_plane(plane, own)
            seconds["encode"] += time.perf_counter() - started
            back = np.empty_like(plane)
            started = time.perf_counter()
            decode_plane(data, own, back)
            seconds["decode"] += time.perf_counter() - started
            encoded[kind] += len(data)
            plain[kind] += plane.nbytes
            if kind == "context":
                exact, got = ((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in (plane, back))
                wrong, norm = wrong + ((got - exact) ** 2).sum(), norm + (exact**2).sum()
    return {
        "context_ratio": encoded["context"] / plain["context"],
        "last_hidden_ratio": encoded["last_hidden"] / plain["last_hidden"],
        "context_relative_error": float(np.sqrt(wrong / norm)),
        "encode_mb_per_second": plain.total() / seconds["encode"] / 1e6,
        "decode_mb_per_second": plain.total() / seconds["decode"] / 1e6,
    }


if __name__ == "__main__":
    main()
