"""A training run as the driver sees it: Ray Train starts the workers, a board brings their metrics, errors come out as they were raised."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from actors.cluster import CPU_ENVIRONMENT
from actors.errors import ActorError
from actors.train_recipe import TrainRecipe
from actors.trainer import Worker
from drafters.errors import DrafterError
from storage.errors import StorageError


class Board:
    """Where rank 0 leaves metric rows for the driver. Metadata only."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def post(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def take(self) -> list[dict[str, Any]]:
        rows, self._rows = self._rows, []
        return rows


BoardActor: Any = ray.remote(num_cpus=0)(Board)


def run_training(
    recipe: TrainRecipe,
    workers: int,
    cpus: int,
    gpus: float,
    scratch: Path,
    on_row: Callable[[dict[str, Any]], None],
    max_failures: int = 3,
) -> None:
    """Train to the last step, from the newest checkpoint if there is one; `on_row` gets every metric row, in order.

    Raises:
        ActorError: there are more workers than samples in a batch, or the workers failed more than `max_failures` times.
        StorageError, DrafterError, ActorError: a worker's own; trying again would not help.
    """
    if recipe.settings.global_batch < workers:
        raise ActorError(
            f"train.global_batch={recipe.settings.global_batch} gives {workers} workers less than a sample each: raise it, "
            "or lower workers.count"
        )
    board = BoardActor.remote()
    for attempt in range(max_failures + 1):
        failure = _fit(recipe, board, workers, cpus, gpus, scratch / str(attempt), on_row)
        if failure is None:
            return
        told = _told(failure)
        if attempt == max_failures or not isinstance(told, _Crashed):
            raise told


class _Crashed(ActorError):
    """The workers ended without a reason that a person can mend: killed, out of memory, a node gone."""


def _fit(
    recipe: TrainRecipe, board: Any, workers: int, cpus: int, gpus: float, scratch: Path, on_row: Callable[[dict[str, Any]], None]
) -> BaseException | None:
    """One start of the workers; returns what ended them early."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        _worker,
        train_loop_config={"recipe": recipe, "board": board},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus > 0, resources_per_worker={"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        ),
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
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
        if isinstance(cause, StorageError | DrafterError | ActorError):
            return cause
    last = (str(causes[0]).strip().splitlines() or [""])[-1]
    return _Crashed(f"the training workers failed ({type(causes[0]).__name__}: {last}). The last checkpoint is kept: run it again to go on")


def _worker(config: dict[str, Any]) -> None:
    import ray.train

    context = ray.train.get_context()
    # `Worker.run` owns everything that must be closed when it ends, well or not.
    Worker(config["recipe"], config["board"], context.get_world_rank(), context.get_world_size()).run()
