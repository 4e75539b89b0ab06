"""Running a cache job on Ray: the ledger and a pool of producers, each replaced when it dies."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.cluster import death_reason, original_error
from actors.engines.vllm import vllm_environment
from actors.errors import ActorError
from actors.ledger import Ledger, LedgerSettings, LedgerStatus, committed_status
from actors.producer import Producer
from actors.rows import CacheRecipe
from storage.errors import StorageUnavailable
from storage.manifest import Manifest
from storage.object_store import ObjectStore

COMPACT_COMMITS = 1000  # a ledger that starts anew reads as many commits one by one, at most
_GRACE_SECONDS = 30.0  # for producers to notice that all is done

# It may die too: a new one rebuilds itself from the commits, and calls on their way reach that one.
CacheLedger: Any = ray.remote(max_restarts=-1, max_task_retries=-1)(Ledger)
LEDGER_OPTIONS = {"num_cpus": 0, "max_concurrency": 32}  # several calls at a time, since commits wait for storage


class RemoteLedger:
    """The methods of `Ledger`, answered by the actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._actor, name)
        return lambda *arguments: ray.get(method.remote(*arguments))


class ProducerActor(Producer):
    """A producer that reaches its ledger through Ray."""

    def run(self, ledger: Any) -> dict[str, float]:
        return super().run(RemoteLedger(ledger))


TargetProducer: Any = ray.remote(max_restarts=0)(ProducerActor)


def run_cache(
    recipe: CacheRecipe, rows: int, ledger_settings: LedgerSettings, on_status: Callable[[LedgerStatus], None], max_deaths: int = 3
) -> tuple[LedgerStatus, list[dict[str, float]]]:
    """Cache rows [0, rows) of the answers with a pool of producers; replaces producers that die.

    Args:
        max_deaths: how many deaths for each producer are borne while not one row is settled.

    Returns:
        The ledger's last word, and each producer's engine seconds and tokens.

    Raises:
        ActorError: producers cannot start or keep dying.
        StorageUnavailable: storage cannot be reached, or refuses us. What was committed is kept.
    """
    # Read here first: what is wrong with the cache is raised as it is, not as the death of an actor.
    status = committed_status(recipe.cache, rows)
    if status.done == rows:
        return status, []
    _abort_uploads(recipe.cache)
    ledger = CacheLedger.options(**LEDGER_OPTIONS).remote(recipe.cache, rows, ledger_settings)
    wanted = min(recipe.settings.producers, -(-status.open // ledger_settings.lease_rows))
    status, reports = _Pool(recipe, ledger, on_status, max_deaths * wanted).run(wanted)
    _abort_uploads(recipe.cache)
    return status, reports


def _abort_uploads(cache: ObjectStore) -> None:
    """Parts of what killed producers were sending are stored, and paid for, until someone aborts the upload."""
    with suppress(StorageUnavailable):  # a permission of its own, and only a matter of space
        cache.abort_uploads("shards/")


@dataclass
class _Pool:
    """The producers at work, and what the driver knows of them."""

    recipe: CacheRecipe
    ledger: Any
    on_status: Callable[[LedgerStatus], None]
    max_deaths: int
    running: dict[Any, tuple[Any, str]] = field(default_factory=dict)
    reports: list[dict[str, float]] = field(default_factory=list)
    started: int = 0
    deaths: int = 0  # since a row was settled last
    compacted: Manifest | None = None

    def run(self, wanted: int) -> tuple[LedgerStatus, list[dict[str, float]]]:
        for _ in range(wanted):
            self._start()
        status, commits = self._status(), 0
        while status.open:
            self._collect(timeout=0.5)
            before, status = status.open, self._status()
            if status.open and not self.running:
                self._start()  # a new ledger has forgotten which rows failed, and gives them another chance
            if status.open < before:
                self.deaths = 0
            if status.commits - commits >= COMPACT_COMMITS:
                commits = status.commits
                self._compact()
            self.on_status(status)
        # Those that wait for a free place in the cluster are not needed any more, and one that hangs is not waited for.
        ray.wait(list(self.running), num_returns=len(self.running), timeout=_GRACE_SECONDS)
        self._collect(timeout=0)
        for actor, _ in self.running.values():
            ray.kill(actor)
        return status, self.reports

    def _start(self) -> None:
        name, settings = f"producer-{self.started}", self.recipe.settings
        environment = {"env_vars": vllm_environment(self.recipe.engine)}
        options = TargetProducer.options(num_cpus=settings.cpus, num_gpus=settings.gpus, runtime_env=environment)
        actor = options.remote(name, self.recipe)
        self.running[actor.run.remote(self.ledger)] = (actor, name)
        self.started += 1

    def _collect(self, timeout: float) -> None:
        """Take reports from producers that ended, and replace those that died."""
        finished, _ = ray.wait(list(self.running), num_returns=len(self.running), timeout=timeout)
        for reference in finished:
            _, name = self.running.pop(reference)
            try:
                self.reports.append(ray.get(reference))
            except RayTaskError as error:
                # One that lost its ledger says nothing new: the next question for the status tells why.
                if not isinstance(cause := original_error(error), RayActorError):
                    raise cause from None
            except RayActorError as error:
                if error.actor_init_failed:
                    raise ActorError(f"{name} cannot start: {death_reason(error)}") from error
                self.deaths += 1
                ray.get(self.ledger.release_producer.remote(name, f"its producer died: {death_reason(error)}"))
                if self.deaths > self.max_deaths:
                    raise ActorError(
                        f"producers died {self.deaths} times and no row was cached in between, last: {death_reason(error)}. "
                        "What was committed is kept; `python -m pipelines.doctor` checks the machine."
                    ) from error
                self._start()

    def _status(self) -> LedgerStatus:
        try:
            status: LedgerStatus = ray.get(self.ledger.status.remote())
        except RayActorError as error:
            raise ActorError(f"the ledger cannot start: {death_reason(error)}. What was committed is kept.") from error
        return status

    def _compact(self) -> None:
        """Save a manifest, so that a ledger that starts anew need not read every commit."""
        self.compacted = Manifest.current(self.recipe.cache, self.compacted)
        self.compacted.save(self.recipe.cache)
