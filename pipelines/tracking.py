"""Weights & Biases: online where a key is configured, offline otherwise, never asking."""

import hashlib
import netrc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Track = Callable[[dict[str, Any]], None]


class TrackingConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    enabled: bool
    project: str
    mode: Literal["online", "offline"] | None


def wandb_mode() -> Literal["online", "offline"]:
    """Online only where a key is configured."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return "offline"
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if "api.wandb.ai" in hosts else "offline"


def open_run(tracking: TrackingConfig, folder: Path, run_id: str, **about: Any) -> Any:
    """A W&B run beside any others that are open, its offline files in `folder`; one of the same id goes on."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=tracking.project,
        id=run_id,
        resume="allow",
        reinit="create_new",
        mode=tracking.mode or wandb_mode(),
        dir=str(folder),
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        **about,
    )


@contextmanager
def tracker(config: TrackingConfig, name: str, folder: Path, facts: dict[str, Any]) -> Iterator[Track]:
    """A function that logs a metrics row; the run keeps its id across resumes, being derived from its folder and facts."""
    if not config.enabled:
        yield lambda row: None
        return
    run_id = hashlib.blake2b(f"{folder}\n{facts['manifest']}\n{facts['settings']}".encode(), digest_size=6).hexdigest()
    run = open_run(config, folder, run_id, name=name, config=facts)
    try:
        yield lambda row: run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])
    finally:
        run.finish()


def log_table(
    config: TrackingConfig, name: str, folder: Path, title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], note: str
) -> None:
    """Log rows as a W&B table, in a run of its own that the folder names: logged again, it is replaced."""
    if not config.enabled:
        return
    import wandb

    run_id = hashlib.blake2b(f"{folder}\n{title}".encode(), digest_size=6).hexdigest()
    run = open_run(config, folder, run_id, name=name, job_type="evaluate", notes=note)
    try:
        run.log({title: wandb.Table(columns=list(columns), data=[[row.get(column) for column in columns] for row in rows])})
    finally:
        run.finish()
