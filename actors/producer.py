"""Producers: Ray actors that run the target over leased rows and write the hidden states to storage.

A producer encodes and uploads one lease while the engine runs the next. Hidden states go from the engine to storage and nowhere else.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError

from actors.answers import AnswerStore
from actors.cluster import death_reason, original_error
from actors.engines.base import Captured, EngineSettings
from actors.engines.make import make_engine
from actors.engines.vllm import vllm_environment
from actors.errors import ActorError
from actors.ledger import Lease, Ledger, LedgerSettings, LedgerStatus
from corpus.answers import AnsweredRow, unusable
from storage.commits import Skipped
from storage.contract import Contract
from storage.errors import StorageError
from storage.object_store import ObjectStore
from storage.sample import Sample, supervised_rows
from storage.shard import ShardWriter, encode_sample


@dataclass(frozen=True)
class ProducerSettings:
    """`producers` engines; `pending_bytes` bounds what one holds in memory between engine and storage."""

    producers: int = 1
    cpus: int = 1
    gpus: float = 0
    shard_bytes: int = 256 << 20
    pending_bytes: int = 512 << 20


class ByteBudget:
    """Back-pressure in bytes: `take` waits until the amount fits (an amount above the whole budget waits until nothing else is held)."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._changed = threading.Condition()

    def take(self, amount: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.held == 0 or self.held + amount <= self.limit)
            self.held += amount

    def give(self, amount: int) -> None:
        with self._changed:
            self.held -= amount
            self._changed.notify_all()


@dataclass(frozen=True)
class CacheRecipe:
    """Everything a producer needs to know: where rows come from, where samples go, and what they must be like."""

    cache: ObjectStore
    answers: ObjectStore
    contract: Contract
    engine: EngineSettings
    mask_token_id: int
    stop_ids: tuple[int, ...]
    settings: ProducerSettings
    keep_truncated: bool = False


class Producer:
    """Holds one engine and works through leases until the ledger has no more."""

    def __init__(self, name: str, recipe: CacheRecipe) -> None:
        self.name, self.recipe = name, recipe
        self.answers = AnswerStore(recipe.answers)
        self.engine = make_engine(recipe.engine)
        self.budget = ByteBudget(recipe.settings.pending_bytes)

    def run(self, ledger: Any) -> dict[str, float]:
        """Lease, capture, write, commit, until all rows are done. Returns its tokens, and seconds in the engine and in all."""
        seconds, tokens, began = 0.0, 0, time.perf_counter()
        writing: list[Future[None]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="writer") as writer:
            while not (reply := ray.get(ledger.lease.remote(self.name))).done:
                if reply.lease is None:
                    # The rest is in other hands, perhaps our own writer's; it may come back.
                    time.sleep(0.2)
                else:
                    started = time.perf_counter()
                    delivery = _Delivery(ledger, reply.lease, self.name, self.recipe, self.budget)
                    tokens += self._capture(delivery, writer)
                    seconds += time.perf_counter() - started
                    writing.append(writer.submit(delivery.finish))
                writing = self._raise_failures(writing)
            for future in writing:
                future.result()
        return {"tokens": float(tokens), "engine_seconds": seconds, "seconds": time.perf_counter() - began}

    @staticmethod
    def _raise_failures(writing: list[Future[None]]) -> list[Future[None]]:
        for future in writing:
            if future.done():
                future.result()
        return [future for future in writing if not future.done()]

    def _capture(self, delivery: "_Delivery", writer: ThreadPoolExecutor) -> int:
        """Run the lease's rows through the engine and hand each over as soon as it is there. Returns how many tokens."""
        tokens = 0
        try:
            lease = delivery.lease
            rows = list(enumerate(self.answers.read(lease.start, lease.stop), lease.start))
            reasons = {index: skip_reason(row, self.recipe) for index, row in rows}
            delivery.skipped += [Skipped(row.row_id, index, reason) for index, row in rows if (reason := reasons[index])]
            usable = [(index, row) for index, row in rows if not reasons[index]]
            for batch in batches(usable, self.recipe.engine.batch_tokens, self.recipe.engine.batch_rows):
                captured = self.engine.prefill([row.masked().input_ids.tolist() for _, row in batch])
                for (index, row), states in zip(batch, captured, strict=True):
                    sample = make_sample(row, states, self.recipe.contract)
                    # Waits for the writer, which frees what this very lease has handed over before.
                    self.budget.take(sample_bytes(sample))
                    writer.submit(delivery.add, index, sample)
                    tokens += len(sample.input_ids)
                if delivery.problem:
                    break
        except Exception as error:
            delivery.problem = _reason(error)
        return tokens


class _Delivery:
    """One lease's way to storage. `add` and `finish` run in the writer thread, in this order; neither raises what a lease can fail of."""

    def __init__(self, ledger: Any, lease: Lease, producer: str, recipe: CacheRecipe, budget: ByteBudget) -> None:
        self.ledger, self.lease, self.producer, self.recipe, self.budget = ledger, lease, producer, recipe, budget
        self.shards = ShardWriter(recipe.cache, recipe.contract, recipe.settings.shard_bytes)
        self.skipped: list[Skipped] = []
        self.problem = ""  # why this lease must be given back
        self._beat = _Heartbeat(ledger, lease, producer)

    def add(self, index: int, sample: Sample) -> None:
        """Encode a sample; whenever a shard is full, upload it. The sample's bytes return to the budget whatever happens."""
        try:
            if not self.problem:
                self._add(index, sample)
        except Exception as error:
            self.problem = _reason(error)
        finally:
            self.budget.give(sample_bytes(sample))

    def _add(self, index: int, sample: Sample) -> None:
        try:
            encoded = encode_sample(sample, self.recipe.contract)
        except StorageError as refused:
            # Not finite, or not what the contract says: this row is reported, the others go on.
            reason = str(refused).removeprefix(f"sample {sample.row_id}: ")
            self.skipped.append(Skipped(sample.row_id, index, f"refused: {reason}"))
        else:
            self.shards.add(encoded, sample.row_id, index)

    def finish(self) -> None:
        """Upload the last shard and tell the ledger where the rows lie, or give the lease back."""
        try:
            if not self.problem:
                ray.get(self.ledger.complete.remote(self.lease.id, self.shards.close(), self.skipped))
        except Exception as error:
            self.problem = _reason(error)
        finally:
            self._beat.stop()
        if self.problem:
            ray.get(self.ledger.fail.remote(self.lease.id, self.producer, self.problem))


def _reason(error: Exception) -> str:
    cause = original_error(error)
    return str(cause) or type(cause).__name__


TargetProducer: Any = ray.remote(max_restarts=0)(Producer)
# It may die too: a new one rebuilds itself from the commits, and calls on their way reach that one.
CacheLedger: Any = ray.remote(max_restarts=-1, max_task_retries=-1)(Ledger)


class _Heartbeat:
    """Tells the ledger, from a thread, that the lease is in good hands."""

    def __init__(self, ledger: Any, lease: Lease, producer: str) -> None:
        self._stopped = threading.Event()
        period = max((lease.deadline - time.time()) / 4, 0.05)

        def beat() -> None:
            while not self._stopped.wait(period):
                try:
                    if not ray.get(ledger.heartbeat.remote(lease.id, producer)):
                        return
                except ray.exceptions.RayError:
                    return

        threading.Thread(target=beat, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()


def skip_reason(row: AnsweredRow, recipe: CacheRecipe) -> str:
    """Why a row is not cached; empty if it is."""
    max_length, mask = recipe.contract.capture.max_length, recipe.mask_token_id
    if reason := unusable(row, recipe.stop_ids, keep_truncated=recipe.keep_truncated):
        return reason
    if len(row.prompt_ids) + len(row.answer_ids) > max_length:
        return "longer than max_length"
    # The mask token must mean "unknown" and nothing else.
    if mask in row.prompt_ids or mask in row.answer_ids:
        return "holds the mask token"
    return ""


def batches(rows: Sequence[tuple[int, AnsweredRow]], batch_tokens: int, batch_rows: int) -> Iterator[list[tuple[int, AnsweredRow]]]:
    """Group rows, longest first, so that a batch holds at most `batch_tokens` tokens (a longer row goes alone) and `batch_rows` rows."""
    batch: list[tuple[int, AnsweredRow]] = []
    held = 0
    for index, row in sorted(rows, key=lambda item: (-len(item[1].prompt_ids) - len(item[1].answer_ids), item[0])):
        length = len(row.prompt_ids) + len(row.answer_ids)
        if batch and (held + length > batch_tokens or len(batch) >= batch_rows):
            yield batch
            batch, held = [], 0
        batch.append((index, row))
        held += length
    if batch:
        yield batch


def bf16_bits(states: torch.Tensor) -> np.ndarray:
    """The uint16 bits of `states` rounded to bf16."""
    return states.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def make_sample(row: AnsweredRow, states: Captured, contract: Contract) -> Sample:
    """One row and its states, as stored: the last hidden state only where the contract keeps it."""
    ids = row.masked().input_ids
    spans = np.asarray([row.span], dtype=np.int32)
    rows = supervised_rows(spans, len(ids), contract.capture.last_hidden_rows)
    return Sample(
        row_id=row.row_id,
        input_ids=ids,
        spans=spans,
        context=bf16_bits(states.context),
        last_hidden=bf16_bits(states.last_hidden[torch.from_numpy(rows.astype(np.int64))]),
        last_rows=rows,
    )


def sample_bytes(sample: Sample) -> int:
    """Bytes of a decoded sample in memory."""
    return int(sample.context.nbytes + sample.last_hidden.nbytes + sample.input_ids.nbytes)


def run_cache(
    recipe: CacheRecipe, rows: int, ledger_settings: LedgerSettings, on_status: Callable[[LedgerStatus], None], max_deaths: int = 3
) -> tuple[LedgerStatus, list[dict[str, float]]]:
    """Cache rows [0, rows) of the answers with a pool of producers; replaces producers that die.

    Returns:
        The ledger's last word, and each producer's engine seconds and tokens.

    Raises:
        ActorError: producers cannot start or keep dying.
    """
    # Read here first: what is wrong with the cache is raised as it is, not as the death of an actor.
    status = Ledger(recipe.cache, rows, ledger_settings).status()
    if status.done == rows:
        return status, []
    ledger = CacheLedger.options(num_cpus=0).remote(recipe.cache, rows, ledger_settings)
    settings = recipe.settings
    environment = vllm_environment(recipe.engine)
    wanted = min(settings.producers, -(-(rows - status.done) // ledger_settings.lease_rows))

    def start(number: int) -> tuple[Any, Any, str]:
        name = f"producer-{number}"
        actor = TargetProducer.options(num_cpus=settings.cpus, num_gpus=settings.gpus, runtime_env={"env_vars": environment}).remote(
            name, recipe
        )
        return actor.run.remote(ledger), actor, name

    running = {reference: (actor, name) for reference, actor, name in map(start, range(wanted))}
    reports: list[dict[str, float]] = []
    deaths, started = 0, wanted
    while running:
        finished, _ = ray.wait(list(running), timeout=0.5)
        for reference in finished:
            _, name = running.pop(reference)
            try:
                reports.append(ray.get(reference))
            except RayActorError as error:
                if error.actor_init_failed:
                    raise ActorError(f"{name} cannot start: {death_reason(error)}") from error
                deaths += 1
                ray.get(ledger.release_producer.remote(name, "its producer died"))
                if deaths > max_deaths:
                    raise ActorError(f"producers died {deaths} times, last: {death_reason(error)}. What was committed is kept.") from error
                reference, actor, name = start(started)
                started += 1
                running[reference] = (actor, name)
        on_status(ray.get(ledger.status.remote()))
    return ray.get(ledger.status.remote()), reports
