"""What can be set of a sweep, typed and checked: where to search and how, what counts, and what a drafter may cost."""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pipelines.job import JobError
from pipelines.target import quoted
from pipelines.train_config import TrainJob
from storage.places import checked_name

Value = Any  # of a config field: a number, a word, a list of them
_RANGE = re.compile(r"\s*(?P<low>\S+?)\s*\.\.\s*(?P<high>\S+)(?P<log>\s+log)?\s*")
_LONGEST_NAME = 60


@dataclass(frozen=True)
class Dimension:
    """One config field that trials differ in: one of `choices`, or from `low` to `high`, on a `log` scale if so asked.

    Attributes:
        path: dotted, as it is overridden on the command line.
        integer: both ends are whole numbers, and so is what lies between.
    """

    path: str
    choices: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False

    def sample(self, random: random.Random) -> Value:
        """A value drawn evenly, of the logarithm where asked."""
        if self.choices:
            return random.choice(self.choices)
        if self.integer and not self.log:
            return random.randint(int(self.low), int(self.high))
        if not self.log:
            return float(f"{random.uniform(self.low, self.high):.6g}")
        drawn = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        return round(drawn) if self.integer else float(f"{drawn:.6g}")


def parse_space(given: Any) -> Any:
    """Nested mappings as in the rest of the config; a list is what to choose from, `low..high` a range, with ` log` on such a scale."""
    if not isinstance(given, Mapping):
        raise ValueError("wants config fields with their values, such as `{drafter: {head_rank: [0, 64]}}`")
    found: list[Dimension] = []

    def walk(inner: Mapping[str, Any], path: str) -> None:
        for key, value in inner.items():
            name = _joined(path, key)
            if isinstance(value, Sequence) and not isinstance(value, str):
                if not value:
                    raise ValueError(f"{name} has no values to choose from")
                found.append(Dimension(name, tuple(dict.fromkeys(_hashable(one) for one in value))))
            elif isinstance(value, Mapping):
                walk(value, name)
            elif value is not None:
                found.append(_range(name, value))

    walk(given, "")
    return tuple(found)


def _range(name: str, value: Any) -> Dimension:
    matched = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if matched is None:
        raise ValueError(f"{name}: give a list of values, or a range such as '1e-4..1e-2 log', not {value!r}")
    try:
        low, high = (int(end) if re.fullmatch(r"[+-]?\d+", end) else float(end) for end in (matched["low"], matched["high"]))
    except ValueError as error:
        raise ValueError(f"{name}: {value!r} is no range: {error}") from error
    log = matched["log"] is not None
    if not low < high or (log and low <= 0):
        raise ValueError(f"{name}: a range goes from a lower to a higher number, a logarithmic one from above zero, not {value!r}")
    return Dimension(name, (), low, high, log, isinstance(low, int) and isinstance(high, int))


def _hashable(value: Value) -> Value:
    return tuple(value) if isinstance(value, list) else value


class EarlyStopping(BaseModel):
    """ASHA on the held-out score; null for none."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    grace_steps: int = Field(ge=1)
    factor: float = Field(gt=1)


class Serving(BaseModel):
    """How drafters are meant to serve: what a round costs is measured, or read from a table of `profile`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    requests: int = Field(ge=1)
    context: int = Field(ge=1)
    repeats: int = Field(ge=1)
    dtype: Literal["bfloat16", "float32"]
    threads: int | None = Field(ge=1)
    table: Path | None


class Constraints(BaseModel):
    """What a drafter may cost at most; combinations that exceed it are left out before they are trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    draft_ms: float | None = Field(gt=0)
    parameters: int | None = Field(ge=1)


class SweepConfig(BaseModel):
    """See conf/sweep.yaml for what each field means."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    space: Annotated[tuple[Dimension, ...], BeforeValidator(parse_space)]
    search: Literal["grid", "random", "optuna"]
    trials: int | None = Field(ge=1)
    seed: int
    objective: Literal["tau", "speed"]
    early_stopping: EarlyStopping | None
    concurrency: int | None = Field(ge=1)
    retries: int = Field(ge=0)
    serving: Serving | None
    constraints: Constraints
    tensorboard: bool
    refresh_seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _together(self) -> "SweepConfig":
        if self.search != "grid" and self.trials is None:
            raise ValueError(f"sweep.search={self.search} needs sweep.trials, how many to run")
        if self.search == "grid" and any(not dimension.choices for dimension in self.space):
            raise ValueError("sweep.search=grid needs lists of values; for ranges use sweep.search=random or optuna, with sweep.trials")
        if self.serving is None and self.objective == "speed":
            raise ValueError("sweep.objective=speed needs sweep.serving: at which load, and what a round costs there")
        if self.serving is None and self.constraints.draft_ms is not None:
            raise ValueError("sweep.constraints.draft_ms needs sweep.serving: at which load")
        return self


class SweepJob(TrainJob):
    sweep: SweepConfig
    mode: Literal["run", "resume", "best"]

    @property
    def folder(self) -> Path:
        return sweep_folder(self.output, self.sweep.name)


def sweep_folder(output: Path, name: str) -> Path:
    """Local folder of a sweep's dashboard and of what is known of its trials."""
    return output / "sweeps" / checked_name(name, "sweep.name")


@dataclass(frozen=True)
class Point:
    """The values of one trial, by path."""

    values: tuple[tuple[str, Value], ...]

    @property
    def name(self) -> str:
        """From its values, so that equal trials have equal names; a part of run names."""
        short = _short_names([path for path, _ in self.values])
        whole = "-".join(f"{short[path]}{_word(value)}" for path, value in self.values) or "only"
        return (
            whole
            if len(whole) <= _LONGEST_NAME
            else f"{whole[: _LONGEST_NAME - 9]}-{hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()}"
        )

    def as_dict(self) -> dict[str, Value]:
        return dict(self.values)


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """The last part of each path, with as many before it as tell it apart from the others."""

    def short(path: str) -> str:
        parts = path.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        alone = [end for end in ends if not any(other != path and f".{other}".endswith(f".{end}") for other in paths)]
        return (alone or ends)[0].replace(".", "_")

    return {path: short(path) for path in paths}


def _word(value: Value) -> str:
    """A value as a part of a name: letters, digits, dots."""
    if isinstance(value, tuple):
        return "_".join(map(_word, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "".join(sign if sign.isalnum() or sign == "." else "_" for sign in text)


def grid(space: Sequence[Dimension]) -> list[Point]:
    """Every combination, the last dimension changing fastest."""
    paths = [dimension.path for dimension in space]
    return [Point(tuple(zip(paths, values, strict=True))) for values in itertools.product(*(dimension.choices for dimension in space))]


def drawn(space: Sequence[Dimension], count: int, seed: int) -> list[Point]:
    """`count` distinct combinations at random, the same for the same seed; fewer where there are no more."""
    dice, found = random.Random(seed), dict[Point, None]()
    for _ in range(100 * count):
        found[Point(tuple((dimension.path, dimension.sample(dice)) for dimension in space))] = None
        if len(found) == count:
            break
    return list(found)


def trial_config(cfg: DictConfig, point: Point, run: str) -> DictConfig:
    """The config of one trial's training: the sweep's own with the point's values; fields that follow them do.

    Raises:
        JobError: the config has no such path, or it is a group.
    """
    plain = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in ("sweep", "mode")])
    plain.run.name = run
    for path, value in point.values:
        _check_path(plain, path)
        OmegaConf.update(plain, path, list(value) if isinstance(value, tuple) else value)
    if "://" not in plain.storage.root:
        plain.train.disk_cache_gib = 0  # what lies in a local folder needs no second copy on a disk
    return plain


def _check_path(cfg: DictConfig, path: str) -> None:
    *outer, last = path.split(".")
    inner: Any = cfg
    for part in outer:
        inner = inner.get(part) if isinstance(inner, DictConfig) and part in inner else None
    if not isinstance(inner, DictConfig) or last not in inner:
        raise JobError(f"sweep.space.{path}: the config of `train` has no {path}")
    if not OmegaConf.is_interpolation(inner, last) and isinstance(inner[last], DictConfig):
        raise JobError(f"sweep.space.{path} is a group of fields: name one of {', '.join(map(str, inner[last]))}")


def overrides_between(plain: Any, full: Any, path: str = "") -> list[str]:
    """What to type for `full`, where `plain` is what the config gives without it."""
    if isinstance(full, Mapping) and isinstance(plain, Mapping):
        found = []
        for key, value in full.items():
            found += overrides_between(plain.get(key, _MISSING), value, _joined(path, key))
        return found
    return [] if plain == full else [f"{path}={_typed(full)}"]


def each_once(overrides: Iterable[str]) -> list[str]:
    """Overrides that give the same config with no field named twice: the last value of a field counts, as on Hydra's command line.

    Mappings stay as they are, since Hydra merges them, and so do deletions.
    """
    found: dict[str, str] = {}
    for override in overrides:
        matched = _ASSIGNMENT.fullmatch(override)
        if matched is None:
            found[override] = override
            continue
        before = _ASSIGNMENT.fullmatch(found.pop(matched["key"], ""))
        # A field that the config lacks is added, whatever its later value is typed with.
        sign = matched["sign"] or (before["sign"] if before is not None else "")
        found[matched["key"]] = f"{sign}{matched['key']}={matched['value']}"
    return list(found.values())


_ASSIGNMENT = re.compile(r"(?P<sign>\+{0,2})(?P<key>[^=~+]+)=(?P<value>(?!\{).*)", re.DOTALL)
_MISSING = object()


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _typed(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | ListConfig):
        return "[" + ",".join(map(_typed, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(one)}" for key, one in value.items()) + "}"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z][\w./:~-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf")
    return text if plain else quoted(text)
