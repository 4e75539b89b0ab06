"""A training run as the driver sees it: Ray Train starts the workers, a board brings their metrics, errors come out as they were raised."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import checkpointing
from actors.cluster import CPU_ENVIRONMENT
from actors.errors import ActorError, Stopped
from actors.train_recipe import TrainRecipe
from actors.trainer import Worker
from decoding.errors import DecodingError
from drafters.errors import DrafterError
from storage.errors import StorageError


class _Board:
    """The driver's board, an actor of its own."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._stopping = False

    def post(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def take(self) -> list[dict[str, Any]]:
        rows, self._rows = self._rows, []
        return rows

    def stop(self) -> None:
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping


BoardActor: Any = ray.remote(num_cpus=0)(_Board)


@dataclass(frozen=True)
class RemoteBoard:
    """A worker's way to the driver's board."""

    actor: Any

    def post(self, row: dict[str, Any]) -> None:
        ray.get(self.actor.post.remote(row))

    def keep(self) -> None:
        """Nothing to do: the driver's board is another process."""

    def stopping(self) -> bool:
        return bool(ray.get(self.actor.stopping.remote()))


@dataclass(frozen=True)
class Workers:
    """How many workers, and what each of them takes."""

    count: int
    cpus: int
    gpus: float


def run_training(
    recipe: TrainRecipe,
    workers: Workers,
    scratch: Path,
    on_row: Callable[[dict[str, Any]], None],
    stop: threading.Event | None = None,
    max_failures: int = 3,
) -> None:
    """Train to the end, from the newest checkpoint if there is one; `on_row` gets every metric row, in order.

    Once `stop` is set, the workers write a checkpoint after the step that they are in, and this returns.

    Raises:
        StorageError, DrafterError, DecodingError, ActorError: a worker's own; trying again would not help.
        ActorError: the workers failed more than `max_failures` times without a new checkpoint in between.
    """
    board = _local_board()
    failures, step = 0, checkpointing.standing_of(recipe.run).step
    for attempt in itertools.count():
        failure = _fit(recipe, board, workers, scratch / str(attempt), on_row, stop)
        if failure is None:
            return
        told = _told(failure)
        if isinstance(told, Stopped) or (isinstance(told, _Crashed) and stop is not None and stop.is_set()):
            return  # what is not in the last checkpoint is done again when the run goes on
        reached = checkpointing.standing_of(recipe.run).step
        failures, step = (1 if reached > step else failures + 1), reached
        if failures > max_failures or not isinstance(told, _Crashed):
            raise told


def _local_board() -> Any:
    """On the driver's node: that of a worker may go at any time."""
    node = ray.get_runtime_context().get_node_id()
    return BoardActor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


class _Crashed(ActorError):
    """The workers ended without a reason that a person can mend: killed, out of memory, a node gone."""


def _fit(
    recipe: TrainRecipe,
    board: Any,
    workers: Workers,
    scratch: Path,
    on_row: Callable[[dict[str, Any]], None],
    stop: threading.Event | None,
) -> BaseException | None:
    """One start of the workers; returns what ended them early."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        _worker,
        train_loop_config={"recipe": recipe, "board": board},
        scaling_config=ScalingConfig(
            num_workers=workers.count,
            use_gpu=workers.gpus > 0,
            resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
        ),
        torch_config=TorchConfig(backend="nccl" if workers.gpus else "gloo"),
        run_config=RunConfig(  # type: ignore[call-arg]  # mypy sees the first version of Ray Train, the second one runs
            name="train",
            storage_path=str(scratch),
            failure_config=FailureConfig(max_failures=0),
            worker_runtime_env={"env_vars": CPU_ENVIRONMENT},
        ),
    )
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.5)
        if stop is not None and stop.is_set():
            board.stop.remote()
        for row in ray.get(board.take.remote()):
            on_row(row)
    for row in ray.get(board.take.remote()):
        on_row(row)
    return failure[0] if failure else None


def _told(error: BaseException) -> BaseException:
    """A worker's own error where one that a person can mend is among them; Ray Train wraps them twice."""
    causes = [getattr(cause, "_base_exc", cause) for cause in (getattr(error, "worker_failures", None) or {0: error}).values()]
    for cause in causes:
        # When one rank stops, the others report a broken connection.
        if isinstance(cause, StorageError | DrafterError | DecodingError | ActorError):
            return cause
    last = (str(causes[0]).strip().splitlines() or [""])[-1]
    return _Crashed(f"the training workers failed ({type(causes[0]).__name__}: {last}). The last checkpoint is kept: run it again to go on")


def _worker(config: dict[str, Any]) -> None:
    import ray.train

    context = ray.train.get_context()
    # `Worker.run` owns everything that must be closed when it ends, well or not.
    Worker(config["recipe"], RemoteBoard(config["board"]), context.get_world_rank(), context.get_world_size()).run()
