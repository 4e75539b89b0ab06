"""Between engine and storage: what overlaps, how many bytes wait, and whose rows count when two producers bring the same lease."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from storage_cases import to_bf16
from test_producer import add_answers, answer, cached_samples, make_recipe
from tiny_models import write_tiny_model

from actors import producer as producer_module
from actors.engines.base import Captured
from actors.engines.hf import HfEngine
from actors.ledger import Ledger, LedgerSettings
from actors.producer import Producer
from actors.rows import CacheRecipe
from storage.commits import read_commits
from storage.object_store import ObjectStore, StorageSettings
from storage.upkeep import find_garbage, remove_garbage

ROWS, TOKENS = 24, 20
ROW_BYTES = 3 * TOKENS * 128 * 2 + (TOKENS - 6) * 128 * 2 + TOKENS * 4  # three planes, a last hidden state for each answer token, ids
LEASES = LedgerSettings(lease_rows=4, lease_seconds=60.0)


class GatedStore(ObjectStore):
    """A folder whose shards arrive only when the gate is open; `rows` have arrived."""

    def __init__(self, settings: StorageSettings) -> None:
        super().__init__(settings)
        self.gate, self.rows, self.looks = threading.Event(), 0, list[Callable[[], None]]()

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if key.startswith("shards/"):
            assert self.gate.wait(60)
            for look in self.looks:
                look()
            self.rows += pa.ipc.open_file(pa.BufferReader(data)).num_record_batches
        super().put(key, data)


@dataclass
class CountingEngine:
    """Two rows a batch; `rows` have been captured."""

    engine: HfEngine
    rows: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.gate.set()

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        assert self.gate.wait(60)
        captured = self.engine.prefill(rows)
        self.rows += len(rows)
        return [Captured(states.context * self.scale, states.last_hidden) for states in captured]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", tied=False)


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> CacheRecipe:
    made = make_recipe(model, ObjectStore(StorageSettings(str(tmp_path))))
    add_answers(made, [answer(made, f"row{n:02d}", n, tokens=TOKENS) for n in range(ROWS)])
    return replace(made, cache=GatedStore(made.cache.settings), engine=replace(made.engine, batch_rows=2))


def make_producer(name: str, recipe: CacheRecipe, monkeypatch: pytest.MonkeyPatch) -> tuple[Producer, CountingEngine]:
    engine = CountingEngine(HfEngine(recipe.engine))
    monkeypatch.setattr(producer_module, "make_engine", lambda settings: engine)
    return Producer(name, recipe), engine


def start(producer: Producer, ledger: Ledger) -> threading.Thread:
    thread = threading.Thread(target=producer.run, args=(ledger,), daemon=True)
    thread.start()
    return thread


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("slow", ["encoding", "upload"])
def test_the_engine_runs_on_while_rows_are_encoded_and_sent(recipe: CacheRecipe, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """With encoding or uploads held back altogether, all leases still pass through the engine."""
    producer, engine = make_producer("a", recipe, monkeypatch)
    encode, gate = producer_module.encode_sample, recipe.cache.gate
    if slow == "encoding":
        gate.set()
        gate = threading.Event()
        monkeypatch.setattr(producer_module, "encode_sample", lambda *given: gate.wait(60) and encode(*given))
    ledger = Ledger(recipe.cache, ROWS, LEASES)
    thread = start(producer, ledger)
    wait_until(lambda: engine.rows == ROWS)
    assert (recipe.cache.rows, ledger.status().done) == (0, 0)
    gate.set()
    thread.join(60)
    assert (ledger.status().cached, ledger.status().failed) == (ROWS, ())
    assert len(cached_samples(recipe)) == ROWS


def test_the_engine_waits_when_so_many_bytes_wait_for_storage(recipe: CacheRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard ever fills up here: what is open must be sent for the engine to go on."""
    limit = 5 * ROW_BYTES + 100
    recipe = replace(recipe, settings=replace(recipe.settings, pending_bytes=limit, shard_bytes=10**9))
    producer, engine = make_producer("a", recipe, monkeypatch)
    waiting: list[int] = []
    recipe.cache.looks.append(lambda: waiting.append(engine.rows - recipe.cache.rows))
    ledger = Ledger(recipe.cache, ROWS, LEASES)
    thread = start(producer, ledger)
    wait_until(lambda: producer.budget.waiting)
    stopped = engine.rows
    time.sleep(0.3)
    assert engine.rows == stopped == 6, "five rows fit, and the sixth came with them in its batch"
    assert producer.budget.held == 5 * ROW_BYTES
    recipe.cache.gate.set()
    thread.join(60)
    assert (ledger.status().cached, producer.budget.held) == (ROWS, 0)
    assert max(waiting) <= 7, "five rows fit; a whole batch of two may have come with neither fitting"
    assert len(waiting) >= ROWS / 6


def test_of_two_producers_with_the_same_lease_one_counts_and_the_others_shard_is_garbage(
    recipe: CacheRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states differ, as those of real engines do: each row is wholly one producer's."""
    recipe.cache.gate.set()
    now = [0.0]
    ledger = Ledger(recipe.cache, ROWS, LEASES, lambda: now[0])
    late, slow = make_producer("late", recipe, monkeypatch)
    quick, _ = make_producer("quick", recipe, monkeypatch)
    slow.scale = 1.5
    slow.gate.clear()
    monkeypatch.setattr(producer_module.Heartbeats, "_beat", lambda self: None)  # no sign of life arrives
    thread = start(late, ledger)
    wait_until(lambda: ledger.status().leased == 1)
    now[0] += LEASES.lease_seconds + 1
    assert ledger.status().leased == 0
    quick.run(ledger)
    assert ledger.status().done == ROWS
    slow.gate.set()
    thread.join(60)
    assert not thread.is_alive()
    status = ledger.status()
    assert (status.cached, status.failed, status.duplicates, status.commits) == (ROWS, (), 1, ROWS // 4)
    assert slow.rows == 4
    committed = {shard.name for commit in read_commits(recipe.cache) for shard in commit.shards}
    garbage = find_garbage(recipe.cache, time.time() + 5)
    assert {stored.key for stored in garbage.old} == set(recipe.cache.list("shards/")) - committed != set()
    remove_garbage(recipe.cache, garbage, time.time() + 5)
    samples, engine = cached_samples(recipe), HfEngine(recipe.engine)
    assert len(samples) == ROWS
    for sample in samples.values():
        (states,) = engine.prefill([sample.input_ids.tolist()])
        assert (sample.context == to_bf16(states.context.numpy())).all()
