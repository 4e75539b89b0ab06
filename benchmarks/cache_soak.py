"""Memory of caching many small rows: does it stay flat?

    python benchmarks/cache_soak.py --rows 20000

A real ledger and a real producer in one process, `hf` engine, a tiny random Llama, rows of 8 to 40 tokens, a local folder. The resident
memory is noted after every tenth of the rows; the slope over the second half is what leaks.
"""

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from actors.answers import AnswerStore, write_part
from actors.engines.base import EngineSettings
from actors.ledger import Ledger, LedgerSettings
from actors.producer import Producer
from actors.rows import CacheRecipe, ProducerSettings
from corpus.answers import AnsweredRow
from corpus.template import ChatTemplate
from pipelines.job import write_json
from storage.contract import Capture, Contract, ensure_contract
from storage.object_store import ObjectStore, StorageSettings
from storage.target_files import target_identity

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_models import write_tiny_model

LAYER_IDS, MAX_LENGTH, PART_ROWS = (1, 3, 5), 64, 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cache_soak.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder))
        add_rows(recipe, args.rows)
        ledger, producer = Ledger(recipe.cache, args.rows, LedgerSettings(lease_rows=16)), Producer("soak", recipe)
        began = time.perf_counter()
        thread = threading.Thread(target=producer.run, args=(ledger,), daemon=True)
        thread.start()
        points: list[tuple[int, float]] = []
        while thread.is_alive():
            done = ledger.status().done
            if done >= (len(points) + 1) * args.rows // 20:
                gc.collect()
                points.append((done, resident_mb()))
                print(f"{done} rows: {points[-1][1]:.0f} MB", file=sys.stderr, flush=True)
            time.sleep(0.05)
        seconds, status = time.perf_counter() - began, ledger.status()
    rows, memory = np.array(points[len(points) // 2 :]).T
    result = {
        "rows": args.rows,
        "cached": status.cached,
        "failed": status.failed_rows,
        "seconds": seconds,
        "commits": status.commits,
        "mb": [round(mb, 1) for _, mb in points],
        "mb_per_10000_rows": float(np.polyfit(rows, memory, 1)[0] * 10_000),
    }
    write_json(args.out, result)
    print(json.dumps(result, indent=2))


def make_recipe(folder: Path) -> CacheRecipe:
    model = write_tiny_model(folder / "model", "llama", tied=False)
    template, root = ChatTemplate(model), ObjectStore(StorageSettings(str(folder / "out")))
    recipe = CacheRecipe(
        cache=root.child("cache"),
        answers=root.child("answers"),
        contract=Contract(target_identity(model, "tiny"), Capture(LAYER_IDS, MAX_LENGTH, "lossless")),
        engine=EngineSettings(str(model), LAYER_IDS, engine="hf", dtype="float32", max_length=MAX_LENGTH),
        mask_token_id=template.vocabulary()["<|reserved_0|>"],
        stop_ids=template.stop_ids,
        settings=ProducerSettings(shard_bytes=1 << 20, pending_bytes=4 << 20),
    )
    ensure_contract(recipe.cache, recipe.contract)
    return recipe


def add_rows(recipe: CacheRecipe, count: int) -> None:
    draw, store = np.random.default_rng(0), AnswerStore(recipe.answers)
    for first in range(0, count, PART_ROWS):
        rows = []
        for number in range(first, min(first + PART_ROWS, count)):
            ids = draw.integers(10, 300, int(draw.integers(8, 40)))
            ids[-1] = recipe.stop_ids[0]
            rows.append(AnsweredRow(f"row{number:07d}", 0, "soak", "chat", ids[:6], ids[6:], "stop"))
        store.register(write_part(recipe.answers, rows, {}, "test"), 1.0)


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1000


if __name__ == "__main__":
    main()
