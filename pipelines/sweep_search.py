"""Which point of the space comes next: a list made beforehand, or Optuna's suggestion after what is known so far."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pipelines.job import JobError
from pipelines.sweep_config import Dimension, Point, SweepConfig, drawn, grid


class Proposals(Protocol):
    def next(self) -> Point | None:
        """The next point; None when there are enough."""
        ...

    def told(self, point: Point, objective: float | None) -> None:
        """How a point turned out; None where it failed or was left out."""
        ...


class Listed:
    """All points of a grid, or a number of random ones: known before anything runs."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        self._left = iter(self.points)

    def next(self) -> Point | None:
        return next(self._left, None)

    def told(self, point: Point, objective: float | None) -> None:
        pass


class OptunaSearch:
    """Optuna's sampler (TPE) over `count` points. Earlier points are told to it again, so that a resumed search knows what it knew.

    Raises:
        JobError: Optuna is not installed.
    """

    def __init__(self, space: Sequence[Dimension], count: int, seed: int, earlier: Iterable[tuple[Point, float | None, bool]]) -> None:
        """
        Args:
            earlier: points of earlier starts in their order, their objective, and whether they are at their end; those that are not
                come first.
        """
        try:
            import optuna
        except ImportError as error:
            raise JobError("sweep.search=optuna needs Optuna: `pip install optuna`, or use sweep.search=random") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self.space, self.count = tuple(space), count
        self._distributions = {dimension.path: self._distribution(dimension) for dimension in space}
        earlier = list(earlier)
        # Another seed for a search that goes on: the same one would suggest the first points again.
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed + len(earlier)))
        self._open = [point for point, _, ended in earlier if not ended]
        self._given = {point: None for point, _, ended in earlier if ended}
        for point, objective, ended in earlier:
            if ended:
                self.told(point, objective)

    def next(self) -> Point | None:
        if len(self._given) >= self.count:
            return None
        point = self._open.pop(0) if self._open else self._fresh()
        if point is not None:
            self._given[point] = None
        return point

    def told(self, point: Point, objective: float | None) -> None:
        state, trial = self._optuna.trial.TrialState, self._optuna.trial
        self._study.add_trial(
            trial.create_trial(
                params={path: self._index(path, value) for path, value in point.values},
                distributions=self._distributions,
                value=objective,
                state=state.COMPLETE if objective is not None else state.FAIL,
            )
        )

    def _fresh(self) -> Point | None:
        """A suggestion that was not made before; None where a space of choices seems to be used up."""
        for _ in range(100):
            asked = self._study.ask(self._distributions)
            point = Point(tuple((dimension.path, self._value(dimension, asked.params[dimension.path])) for dimension in self.space))
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)  # its outcome is added as a trial of its own
            if point not in self._given:
                return point
        return None

    def _distribution(self, dimension: Dimension) -> Any:
        of = self._optuna.distributions
        if dimension.choices:
            return of.CategoricalDistribution(tuple(range(len(dimension.choices))))
        if dimension.integer:
            return of.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
        return of.FloatDistribution(dimension.low, dimension.high, log=dimension.log)

    def _value(self, dimension: Dimension, suggested: Any) -> Any:
        if dimension.choices:
            return dimension.choices[suggested]
        return suggested if dimension.integer else float(f"{suggested:.6g}")

    def _index(self, path: str, value: Any) -> Any:
        dimension = next(one for one in self.space if one.path == path)
        return dimension.choices.index(value) if dimension.choices else value


def proposals(config: SweepConfig, earlier: Iterable[tuple[Point, float | None, bool]]) -> Listed | OptunaSearch:
    """As the config asks."""
    if config.search == "grid":
        return Listed(grid(config.space))
    assert config.trials is not None
    if config.search == "random":
        return Listed(drawn(config.space, config.trials, config.seed))
    return OptunaSearch(config.space, config.trials, config.seed, earlier)
