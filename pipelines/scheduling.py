"""Verification schedules by name (conf/schedule): from a few words of config to a policy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decoding.calibration import Calibrator
from decoding.gate import DraftGate
from decoding.policies import Asynchronous, Costs, HardwareAware, Policy, StaticLength, Threshold
from decoding.simulator import Contender
from decoding.throughput import OnlineTable, ThroughputTable
from pipelines.job import JobError

CONF = Path(__file__).parent.parent / "conf" / "schedule"


class ScheduleConfig(BaseModel):
    """One file of conf/schedule.

    `policy`: none (no drafter), full_block, static (`length`), threshold, algorithm1, asynchronous. `gate` decides first for whom to draft;
    `online` corrects the cost table by what rounds take.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    policy: Literal["none", "full_block", "static", "threshold", "algorithm1", "asynchronous"]
    length: int | None = Field(default=None, ge=0)
    threshold: float | None = Field(default=None, ge=0, le=1)
    gate: bool = False
    online: bool = False

    @model_validator(mode="after")
    def _complete(self) -> "ScheduleConfig":
        if (self.policy == "static") != (self.length is not None):
            raise ValueError("`length` belongs to policy static, and to it alone")
        if (self.policy == "threshold") != (self.threshold is not None):
            raise ValueError("`threshold` belongs to policy threshold, and to it alone")
        if self.gate and self.policy == "none":
            raise ValueError("without a drafter there is nothing to gate")
        return self

    @property
    def fixed(self) -> bool:
        """Its lengths do not follow from the cost table."""
        return not self.gate and self.policy not in ("algorithm1", "asynchronous")

    @property
    def reads_confidence(self) -> bool:
        return self.gate or self.policy in ("threshold", "algorithm1", "asynchronous")


def load_schedule(name: str) -> ScheduleConfig:
    """One file of conf/schedule by its name.

    Raises:
        JobError: there is none of that name, or it is not a schedule.
    """
    known = sorted(path.stem for path in CONF.glob("*.yaml"))
    if name not in known:
        raise JobError(f"there is no schedule {name!r}. Known: {', '.join(known)}")
    try:
        return ScheduleConfig.model_validate(OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=True))
    except ValidationError as error:
        raise JobError(f"conf/schedule/{name}.yaml: {error.errors()[0]['msg']}") from error


Shorter = Mapping[int, np.ndarray]
"""By block length, measured survival of such blocks over that of whole ones."""


def make_policy(
    schedule: ScheduleConfig, calibrator: Calibrator, table: ThroughputTable | None, prior: np.ndarray, trust: float, shorter: Shorter
) -> Policy:
    """A policy with its own memory.

    Args:
        prior: [g] survival that the gate credits a new request with.
        trust: how much the gate believes of what a request's past says.
        shorter: block lengths that the gate may choose besides whole blocks.

    Raises:
        JobError: a gate without a cost table.
    """
    costs: Costs | None = OnlineTable(table) if schedule.online and table is not None else table
    policy = Policy()
    if schedule.policy == "static":
        policy = StaticLength(schedule.length or 0)
    elif schedule.policy == "threshold":
        policy = Threshold(schedule.threshold or 0.0, calibrator)
    elif schedule.policy == "algorithm1":
        policy = HardwareAware(calibrator, costs)
    elif schedule.policy == "asynchronous":
        policy = Asynchronous(calibrator, costs)
    if schedule.gate:
        if table is None:
            raise JobError(
                f"schedule {schedule.name!r} gates drafting by its cost, and there is no cost table: run `python -m pipelines.profile`"
            )
        policy = DraftGate(policy, calibrator, table, prior, shorter, trust)
    policy.name = schedule.name
    return policy


def contender(
    schedule: ScheduleConfig, calibrator: Calibrator, table: ThroughputTable | None, prior: np.ndarray, trust: float, shorter: Shorter
) -> Contender:
    """For the simulator: a policy of its own for each replica."""

    def make() -> Policy:
        return make_policy(schedule, calibrator, table, prior, trust, shorter)

    return Contender(schedule.name, make, schedule.policy != "none", shorter)
