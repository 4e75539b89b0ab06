"""The ledger and the manifest at full size: lease operations a second, time to open, memory.

    python benchmarks/ledger_scale.py

1.35 million rows and 300 simulated producers against the real ledger actor and real commits in a local folder. A simulated producer leases,
sends heartbeats and brings results as a real one does, over Ray; only its engine and its shards are missing. Half way the ledger is killed.
An operation is one lease handed out, extended or committed. Memory is the peak of the process (VmHWM), Python and libraries included.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.ledger import Lease, LeaseResult, Ledger, LedgerSettings
from storage.commits import read_commits
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.shard import Entry, ShardInfo

HEARTBEATS = 3  # for each lease: a lease lasts about as long as its deadline, and a producer beats four times in it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_350_000)
    parser.add_argument("--lease-rows", type=int, default=32)
    parser.add_argument("--producers", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="leases in one call")
    parser.add_argument("--folder", type=Path, help="where the cache goes (a temporary folder by default)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ledger_scale.json"))
    args = parser.parse_args()
    from pipelines.job import write_json

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = ObjectStore(StorageSettings(folder))
        result = {"rows": args.rows, "lease_rows": args.lease_rows, "producers": args.producers, "batch": args.batch}
        note(result, fill(store, args))
        behind = len(read_commits(store, known=Manifest.load(store).leases))
        note(result, {"commits_since_manifest": behind, "ledger_opens_midway": apart(open_ledger, store, args.rows, args.lease_rows)})
        for key in store.list("manifest-"):
            store.delete(key)
        note(result, {"ledger_opens_without_manifest": apart(open_ledger, store, args.rows, args.lease_rows)})
        note(result, {"manifest_compacts_all_commits": apart(compact, store)})
        note(result, {"ledger_opens": apart(open_ledger, store, args.rows, args.lease_rows)})
        note(result, {"manifest_opens": apart(open_manifest, store, args.rows // 2)})
    write_json(args.out, result)
    print(json.dumps(result, indent=2))


def note(result: dict[str, Any], more: dict[str, Any]) -> None:
    """Show what has been measured so far: the whole takes minutes."""
    result |= more
    print(json.dumps(more), file=sys.stderr, flush=True)


def fill(store: ObjectStore, args: argparse.Namespace) -> dict[str, Any]:
    """Cache all rows with simulated producers."""
    # Here, so that the processes which only open a ledger or a manifest do not carry Ray and torch.
    import ray

    from actors.caching import COMPACT_COMMITS, LEDGER_OPTIONS, CacheLedger, RemoteLedger
    from actors.cluster import ClusterSettings, cluster

    counts, lock, killed = {"operations": 0, "calls": 0}, threading.Lock(), {"seconds": 0.0}
    with cluster(ClusterSettings("local", cpus=2)):
        actor = CacheLedger.options(**LEDGER_OPTIONS).remote(store, args.rows, LedgerSettings(args.lease_rows))
        ledger = RemoteLedger(actor)
        ledger.status()
        peaks = [memory_of(actor)]

        def produce(number: int) -> None:
            name = f"producer-{number}"
            while not (reply := ledger.lease(name, args.batch)).done:
                for _ in range(HEARTBEATS if reply.leases else 0):
                    ledger.heartbeat(name, [lease.id for lease in reply.leases])
                if reply.leases:
                    ledger.complete([result_of(lease) for lease in reply.leases])
                else:
                    time.sleep(0.5)
                with lock:
                    counts["operations"] += len(reply.leases) * (2 + HEARTBEATS)
                    counts["calls"] += 2 + HEARTBEATS if reply.leases else 1

        began = time.perf_counter()
        threads = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(args.producers)]
        for thread in threads:
            thread.start()
        compacted, compacting, manifest = 0, 0.0, None
        while (status := ledger.status()).open:
            if not killed["seconds"] and status.done > args.rows / 2:
                peaks.append(memory_of(actor))
                started = time.perf_counter()
                ray.kill(actor, no_restart=False)
                ledger.status()
                killed["seconds"] = time.perf_counter() - started
                compacted = 0
            if status.commits - compacted >= COMPACT_COMMITS:  # as the driver of `cache` does
                started, compacted = time.perf_counter(), status.commits
                manifest = Manifest.current(store, manifest)
                manifest.save(store)
                compacting += time.perf_counter() - started
            time.sleep(0.5)
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        peaks.append(memory_of(actor))
        status = ledger.status()
    return {
        "leases": -(-args.rows // args.lease_rows),
        "seconds": seconds,
        "operations_per_second": counts["operations"] / seconds,
        "calls_per_second": counts["calls"] / seconds,
        "commits_per_second": -(-args.rows // args.lease_rows) / seconds,
        "compacting_seconds": compacting,
        "restart_seconds": killed["seconds"],
        "ledger_mb_empty": peaks[0],
        "ledger_mb_peak": max(peaks),
        "done": status.done,
        "failed": status.failed_rows,
    }


def result_of(lease: Lease) -> LeaseResult:
    """What a producer would bring: one shard with the lease's rows."""
    entries = tuple(Entry(f"{row:032x}.0", row, row * 4096, 4096, row, 900, 600) for row in range(lease.start, lease.stop))
    shard = ShardInfo(f"shards/{lease.start:040x}.arrow", 4096 * len(entries), f"{lease.start:064x}", entries)
    return LeaseResult(lease.id, (shard,))


def memory_of(actor: Any) -> float:
    """Peak resident memory of an actor's process so far, in MB."""
    import ray

    return float(ray.get(actor.__ray_call__.remote(lambda _: peak_mb())))


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1000


def apart(action: Callable[..., object], *arguments: Any) -> dict[str, float]:
    """Seconds and peak MB of an action, in a fresh process of its own."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    process = context.Process(target=_measured, args=(answers, action, arguments))
    process.start()
    process.join()
    return dict(answers.get())


def _measured(answers: Any, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    started = time.perf_counter()
    action(*arguments)
    answers.put({"seconds": time.perf_counter() - started, "peak_mb": peak_mb()})


def open_ledger(store: ObjectStore, rows: int, lease_rows: int) -> None:
    Ledger(store, rows + 1, LedgerSettings(lease_rows)).status()


def compact(store: ObjectStore) -> None:
    Manifest.current(store).save(store)


def open_manifest(store: ObjectStore, position: int) -> None:
    Manifest.load(store).entry(position)


if __name__ == "__main__":
    main()
