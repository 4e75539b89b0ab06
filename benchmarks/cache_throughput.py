"""Tokens a second of `cache`, end to end, over the bare engine's prefill; and its bytes a token over the published layout's.

    python benchmarks/cache_throughput.py --output outputs/demo

Both work on the answers that `make demo` left behind: the same rows in the same batches, one engine of one thread. Bare: vLLM without
capture, one token generated, nothing kept. Cache: a producer from its first lease to its last commit, encoding and writing included, engine
start left out in both; once into a folder and once to a real S3 server (rclone, started here on this machine). They take turns
(A B C A B C), each in a fresh process with the engine's environment.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from actors.answers import AnswerStore
from actors.caching import run_cache
from actors.cluster import ClusterSettings, cluster
from actors.engines.base import EngineSettings
from actors.engines.vllm import vllm_environment
from actors.ledger import LedgerSettings
from actors.rows import CacheRecipe, ProducerSettings, batches, cached_rows
from pipelines.job import write_json
from pipelines.target import Target, load_target_config
from storage.contract import Capture, Contract, ensure_contract
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from s3_server import aws_environment, start  # the tests' S3 server

PARTS = ("bare", "cache", "cache_s3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder that holds the answers: `make demo` leaves one")
    parser.add_argument("--corpus", default="bundled")
    parser.add_argument("--codec", default="lossless")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", choices=PARTS, help="(internal) one measurement, as JSON; set the engine's environment first")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cache_throughput.json"))
    args = parser.parse_args()
    if args.part:
        print(json.dumps(bare(args) if args.part == "bare" else cached(args, s3=args.part == "cache_s3")))
        return
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    environment = vllm_environment(recipe(args, ObjectStore(StorageSettings(tempfile.gettempdir())))[0].engine) | aws_environment()
    for _ in range(args.rounds):
        for part, measured in results.items():
            command = [
                sys.executable,
                __file__,
                "--part",
                part,
                "--output",
                str(args.output),
                "--corpus",
                args.corpus,
                "--codec",
                args.codec,
            ]
            # From the process's start: OpenMP reads how many threads it may use when torch is imported.
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
            measured.append(json.loads(done.stdout.splitlines()[-1]))
            print(part, measured[-1], flush=True)
    speed = {part: statistics.median(row["tokens_per_second"] for row in rows) for part, rows in results.items()}
    summary = {
        "bare_tokens_per_second": speed["bare"],
        "cache_tokens_per_second": speed["cache"],
        "cache_s3_tokens_per_second": speed["cache_s3"],
        "ratio": speed["cache"] / speed["bare"],
        "ratio_s3": speed["cache_s3"] / speed["bare"],
        "bytes_per_token": results["cache"][0]["bytes_per_token"],
        "of_published_layout": results["cache"][0]["of_published_layout"],
        "codec": args.codec,
        "runs": results,
    }
    write_json(args.out, summary)
    print(json.dumps({key: value for key, value in summary.items() if key != "runs"}, indent=2))


def recipe(args: argparse.Namespace, store: ObjectStore) -> tuple[CacheRecipe, Target]:
    target = load_target_config("smollm2_135m").resolve(lambda text: print(text, file=sys.stderr))
    engine = EngineSettings(model=str(target.folder), layer_ids=target.layer_ids, max_length=512)
    contract = Contract(target.identity, Capture(layer_ids=target.layer_ids, max_length=512, codec=args.codec))
    answers = ObjectStore(StorageSettings(str(args.output))).child(Places(target.config.name, args.corpus).answers)
    return CacheRecipe(store, answers, contract, engine, target.mask_token_id, target.template.stop_ids, ProducerSettings()), target


def bare(args: argparse.Namespace) -> dict[str, Any]:
    """The engine alone, over the rows that would be cached."""
    made, _ = recipe(args, ObjectStore(StorageSettings(tempfile.gettempdir())))
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = made.engine
    llm = LLM(
        model=engine.model,
        dtype="bfloat16",
        max_model_len=engine.max_length + 1,
        max_num_batched_tokens=engine.batch_tokens,
        max_num_seqs=engine.batch_rows,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=True,
    )
    rows, _ = cached_rows(enumerate(AnswerStore(made.answers)), made)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    leases = [rows[start : start + 32] for start in range(0, len(rows), 32)]
    groups = [group for lease in leases for group in batches(lease, engine.batch_tokens, engine.batch_rows)]
    prompts = [[TokensPrompt(prompt_token_ids=row.input_ids.tolist()) for _, row in group] for group in groups]
    llm.generate(prompts[0], sampling, use_tqdm=False)
    started = time.perf_counter()
    for group in prompts:
        llm.generate(group, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(row.input_ids) for _, row in rows)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def cached(args: argparse.Namespace, s3: bool) -> dict[str, Any]:
    """`cache` with one producer into a fresh folder, or a fresh server's bucket."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = ObjectStore(StorageSettings(folder))
        if s3:
            server, process = start(Path(folder))
            stack.callback(process.wait)
            stack.callback(process.terminate)
            store = server.store("cache")
        made, target = recipe(args, store)
        ensure_contract(made.cache, made.contract)
        with cluster(ClusterSettings()):
            rows = AnswerStore(made.answers).rows
            status, reports = run_cache(made, rows, LedgerSettings(lease_rows=32), lambda status: None)
    report = reports[0]
    published = 12 * target.identity.hidden_size + 6
    return {
        **report,
        "tokens_per_second": report["tokens"] / report["seconds"],
        "bytes_per_token": status.bytes / status.tokens,
        "of_published_layout": status.bytes / status.tokens / published,
    }


if __name__ == "__main__":
    main()
