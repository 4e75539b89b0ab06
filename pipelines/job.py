"""What every job shares: typed config, one-line errors, progress bars, the summary and the `result:` line."""

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from actors.cluster import ClusterSettings, original_error
from actors.errors import ActorError
from corpus.errors import CorpusError
from corpus.sources import SourceSpec
from decoding.errors import DecodingError
from drafters.errors import DrafterError
from pipelines.plain_data import ReportError
from pipelines.target import TargetConfig, UnknownTarget, as_overrides, quoted
from storage.errors import StorageError
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places

# Progress and notices go to stderr, so that stdout ends with the `result:` line whatever happens on a terminal.
notices = Console(stderr=True, highlight=False)
output = Console(highlight=False, soft_wrap=True)


class JobError(Exception):
    """The job cannot be done as asked."""


MENDABLE = (JobError, ReportError, UnknownTarget, ActorError, CorpusError, DecodingError, DrafterError, StorageError)
JobType = TypeVar("JobType", bound="Job")


def _as_list(value: Any) -> Any:
    """A source by its name alone, one source, or a list of either; none is an empty list."""
    given = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return [{"name": one} if isinstance(one, str) else one for one in given]


Sources = Annotated[tuple[SourceSpec, ...], BeforeValidator(_as_list)]


class CorpusConfig(BaseModel):
    """Which prompts: one or several sources, the held-out part from sources of its own or a share by hash, and what to leave out."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    train: Sources = Field(min_length=1)
    heldout: Sources
    heldout_share: float = Field(ge=0, lt=1)
    max_train: int | None = Field(ge=1)
    max_heldout: int | None = Field(ge=1)
    max_tokens: int | None = Field(ge=1)
    benchmarks: str | None
    answers: Literal["drop", "keep"]
    unstable_template: Literal["refuse", "last_turn"]


class Job(BaseModel):
    """The part of a job's config that all jobs have. Subclasses add theirs; an unknown or ill-typed key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    output: Path
    target: TargetConfig
    storage: StorageSettings
    corpus: CorpusConfig
    cluster: ClusterSettings

    @classmethod
    def from_config(cls: type[JobType], cfg: DictConfig) -> JobType:
        """Build the job from Hydra's config, reporting every mistake at once.

        Raises:
            JobError: with one line for each mistake.
        """
        try:
            job = cls.model_validate(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
        except OmegaConfBaseException as error:
            raise JobError(f"config: {error.full_key or 'value'}: {str(error).splitlines()[0]}") from error
        except ValidationError as error:
            raise JobError("config: " + "; ".join(map(_mistake, error.errors()))) from error
        # Ray workers have other working folders.
        root = job.storage.root if "://" in job.storage.root else str(Path(job.storage.root).expanduser().resolve())
        return job.model_copy(
            update={"output": job.output.expanduser().resolve(), "storage": dataclasses.replace(job.storage, root=root)},
        )

    @property
    def places(self) -> Places:
        return Places(self.target.name, self.corpus.name)

    def open_store(self) -> ObjectStore:
        """The storage root; it and the folder for results are checked to be writable before any long work starts."""
        store = ObjectStore(self.storage)
        write_json(self.result_path(".writable"), {})
        self.result_path(".writable").unlink()
        store.check_writable()
        return store

    def result_path(self, name: str) -> Path:
        """Local path of this job's JSON result."""
        return self.output / self.target.name / self.corpus.name / f"{name}.json"


def _mistake(mistake: Mapping[str, Any]) -> str:
    """One of pydantic's findings, in the words of a person who types overrides."""
    name = ".".join(map(str, mistake["loc"]))
    if mistake["type"] == "extra_forbidden":
        return f"{name}: there is no such key"
    return f"{name}={mistake['input']}: {mistake['msg'][0].lower()}{mistake['msg'][1:]}"


def tell(error: object) -> None:
    """One line on stderr, word for word: a message may hold brackets that look like markup."""
    notices.print(Text.assemble(("error", "red"), f": {error}"), soft_wrap=True)


def mendable(body: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Print an error that a person can mend as one line and exit with 2; anything else stays a traceback."""

    @functools.wraps(body)
    def run(cfg: DictConfig) -> None:
        try:
            body(cfg)
        except Exception as error:
            cause = original_error(error)
            if not isinstance(cause, MENDABLE):
                raise
            tell(cause)
            sys.exit(2)

    return run


def launch(main: Callable[[], None], flags: Mapping[str, str] | None = None, rename: Mapping[str, str] | None = None) -> None:
    """Run a Hydra `main`, accepting a target in any usual spelling (`target=Qwen/Qwen3-8B`), and `--show N` for `show=N`.

    Args:
        flags: overrides that may be written as a flag too, e.g. `--stat` for `mode=stat`.
        rename: keys that are written under another name, since a config group has theirs.
    """
    try:
        arguments = [(flags or {}).get(argument, argument) for argument in sys.argv[1:]]
        sys.argv[1:] = as_overrides(_with_show([_renamed(argument, rename or {}) for argument in arguments]))
    except (UnknownTarget, JobError) as error:
        tell(error)
        sys.exit(2)
    # Nobody is ever asked anything, and no library reports home.
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        main()
    except KeyboardInterrupt:
        notices.print("[yellow]stopped[/]: run the same command again to go on")
        sys.stdout.flush()
        # Everything is closed, but a thread that waits for an actor of the Ray that is gone would keep the interpreter from ending.
        os._exit(130)


def _renamed(argument: str, names: Mapping[str, str]) -> str:
    """`drafter=FOLDER` as `drafters="FOLDER"`; a list in brackets stays one."""
    key, equals, value = argument.partition("=")
    if not equals or key not in names:
        return argument
    given = value if value.startswith(("[", "'", '"')) else quoted(value)
    return f"{names[key]}={given}"


def _with_show(arguments: Sequence[str]) -> list[str]:
    """`--show 3` and `--show=3` as the override they stand for: the one option that people type as a flag."""
    rest = iter(arguments)
    overrides = []
    for argument in rest:
        flag, equals, count = argument.partition("=")
        if flag != "--show":
            overrides.append(argument)
            continue
        count = count if equals else next(rest, "")
        if not count.isdecimal():
            raise JobError(f"--show takes the number of rows to print, such as `--show 3`, not {count!r}")
        overrides.append(f"show={count}")
    return overrides


def progress(window_seconds: float = 30) -> Progress:
    """A progress bar on stderr with count, rate text, elapsed and remaining time, the latter by the speed of so many last seconds."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=notices,
        speed_estimate_period=window_seconds,
    )


def finish(title: str, rows: Mapping[str, str], result: Mapping[str, Any], path: Path) -> None:
    """Print the one-screen summary, write the result JSON, and name it on the last line of stdout."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    output.print(table)
    write_json(path, {**result, "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    print(f"result: {path}", flush=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write whole or not at all."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}. Give another folder with `output=...`.") from error
