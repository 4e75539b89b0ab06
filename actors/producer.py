"""Producers run the target over leased rows and write the hidden states to storage.

`Producer` is a plain class; `actors.caching` runs it as a Ray actor. It encodes and uploads one lease while the engine runs the next.
Hidden states go from the engine to storage and nowhere else.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from actors.cluster import original_error
from actors.engines.make import make_engine
from actors.ledger import Lease, LeaseResult
from actors.rows import AnsweredRows, CacheRecipe, OnePassRows, sample_bytes
from storage.commits import Skipped
from storage.errors import StorageError, StorageUnavailable
from storage.sample import Sample
from storage.shard import ShardWriter, encode_sample

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 5.0  # between questions for work while the rest is in other hands


class ByteBudget:
    """Back-pressure in bytes, for one taker. An amount above the whole budget waits until nothing else is held."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held, self.waiting = limit, 0, False
        self._changed = threading.Condition()

    def take(self, amount: int, when_full: Callable[[], object]) -> None:
        """Hold `amount` more bytes; `when_full` is called before waiting, to have something set free."""

        def fits() -> bool:
            return self.held == 0 or self.held + amount <= self.limit

        with self._changed:
            if not fits():
                self.waiting = True
                when_full()
                self._changed.wait_for(fits)
                self.waiting = False
            self.held += amount

    def give(self, amount: int) -> None:
        with self._changed:
            self.held -= amount
            self._changed.notify_all()


class Producer:
    """Holds one engine and works through leases until the ledger has no more."""

    def __init__(self, name: str, recipe: CacheRecipe) -> None:
        self.name, self.recipe = name, recipe
        engine = make_engine(recipe.engine)
        self.source = OnePassRows(recipe, recipe.one_pass, engine) if recipe.one_pass else AnsweredRows(recipe, engine)
        self.budget = ByteBudget(recipe.settings.pending_bytes)

    def run(self, ledger: Any) -> dict[str, float]:
        """Lease, capture, write, commit, until all rows are done. Returns its tokens, and seconds in the engine and in all.

        Args:
            ledger: a Ledger, or what calls one elsewhere.

        Raises:
            StorageUnavailable: storage failed for longer than `StorageSettings.attempts` bridge; what was leased is given back.
        """
        seconds, tokens, began, pause = 0.0, 0, time.perf_counter(), FIRST_PAUSE_SECONDS
        writing: list[Future[None]] = []
        with Heartbeats(ledger, self.name) as heartbeats, ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
            while not (reply := ledger.lease(self.name)).done:
                if not reply.leases:
                    # The rest is in other hands, perhaps our own writer's; it may come back. Hundreds of producers may be asking.
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                for lease in reply.leases:
                    # One that failed before is worked on alone: should this producer die of it, no other lease is blamed.
                    alone = lease.attempt > 1
                    try:
                        writing = self._raise_failures(writing, wait=alone)
                    except StorageUnavailable:
                        ledger.give_back(lease.id, self.name)  # nothing was tried with this one
                        raise
                    started, pause = time.perf_counter(), FIRST_PAUSE_SECONDS
                    delivery = Delivery(ledger, lease, self.name, self.recipe, self.budget, heartbeats)
                    tokens += self._capture(delivery, writer)
                    seconds += time.perf_counter() - started
                    writing = self._raise_failures([*writing, writer.submit(delivery.finish)], wait=alone)
            self._raise_failures(writing, wait=True)
        return {"tokens": float(tokens), "engine_seconds": seconds, "seconds": time.perf_counter() - began}

    @staticmethod
    def _raise_failures(writing: list[Future[None]], wait: bool) -> list[Future[None]]:
        for future in writing:
            if wait or future.done():
                future.result()
        return [future for future in writing if not future.done()]

    def _capture(self, delivery: "Delivery", writer: ThreadPoolExecutor) -> int:
        """Run the lease's rows through the engine and hand each over as soon as it is there. Returns how many tokens."""
        tokens = 0
        try:
            for index, sample in self.source.samples(delivery.lease, delivery.skipped):
                self.budget.take(sample_bytes(sample), when_full=lambda: writer.submit(delivery.relieve))
                writer.submit(delivery.add, index, sample)
                tokens += len(sample.input_ids)
                if delivery.problem:
                    break
        except Exception as error:
            delivery.problem = error
        return tokens


class Delivery:
    """One lease's way to storage. Its methods run in the writer thread, in the order of their calls.

    A sample's bytes stay in the budget until its shard is uploaded.
    """

    def __init__(self, ledger: Any, lease: Lease, producer: str, recipe: CacheRecipe, budget: ByteBudget, heartbeats: "Heartbeats") -> None:
        self.ledger, self.lease, self.producer, self.recipe, self.budget = ledger, lease, producer, recipe, budget
        self.shards = ShardWriter(recipe.cache, recipe.contract, recipe.settings.shard_bytes)
        self.skipped: list[Skipped] = []
        self.problem: Exception | None = None  # why this lease must be given back
        self._held = 0
        self._heartbeats = heartbeats
        heartbeats.begin(lease)

    def add(self, index: int, sample: Sample) -> None:
        """Encode a sample; whenever a shard is full, upload it."""
        self._held += sample_bytes(sample)
        try:
            if not self.problem:
                self._add(index, sample)
        except Exception as error:
            self.problem = error
        if self.problem or not self.shards.open_bytes:
            self._give()

    def _add(self, index: int, sample: Sample) -> None:
        try:
            encoded = encode_sample(sample, self.recipe.contract)
        except StorageError as refused:
            # Not finite, or not what the contract says: this row is reported, the others go on.
            reason = str(refused).removeprefix(f"sample {sample.row_id}: ")
            self.skipped.append(Skipped(sample.row_id, index, f"refused: {reason}"))
        else:
            self.shards.add(encoded, sample.row_id, index)

    def relieve(self) -> None:
        """Upload the open shard, though it is not full, if the engine is waiting for its bytes."""
        try:
            if self.budget.waiting and not self.problem:
                self.shards.flush()
        except Exception as error:
            self.problem = error
        if not self.shards.open_bytes or self.problem:
            self._give()

    def finish(self) -> None:
        """Upload the last shard and tell the ledger where the rows lie, or give the lease back.

        Raises:
            StorageUnavailable: the lease is given back, and the producer cannot go on.
        """
        try:
            if not self.problem:
                self.ledger.complete([LeaseResult(self.lease.id, tuple(self.shards.close()), tuple(self.skipped))])
        except Exception as error:
            self.problem = error
        finally:
            self._give()
            self._heartbeats.end(self.lease)
        if not self.problem:
            return
        cause = original_error(self.problem)
        if isinstance(cause, StorageUnavailable):
            self.ledger.give_back(self.lease.id, self.producer)
            raise cause
        self.ledger.fail(self.lease.id, self.producer, str(cause) or type(cause).__name__)

    def _give(self) -> None:
        self.budget.give(self._held)
        self._held = 0


class Heartbeats:
    """Tells the ledger, from a thread, which leases the producer is working on."""

    def __init__(self, ledger: Any, producer: str) -> None:
        self._ledger, self._producer = ledger, producer
        self._leases: set[str] = set()
        self._period = 1.0
        self._lock = threading.Lock()  # held while a heartbeat is on its way, so that none can name a lease that has ended
        self._stopped = threading.Event()

    def __enter__(self) -> "Heartbeats":
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()

    def begin(self, lease: Lease) -> None:
        with self._lock:
            self._leases.add(lease.id)
            self._period = max(lease.seconds / 4, 0.05)

    def end(self, lease: Lease) -> None:
        with self._lock:
            self._leases.discard(lease.id)

    def _beat(self) -> None:
        while not self._stopped.wait(self._period):
            with self._lock:
                try:
                    if self._leases:
                        self._leases -= self._ledger.heartbeat(self._producer, tuple(self._leases))
                except Exception:  # the producer's own next call to the ledger tells
                    return
