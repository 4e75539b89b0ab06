"""A sweep's trial as a training of its own: `train +experiment=from_sweep sweep=NAME trial=best`."""

import shlex
from pathlib import Path

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipelines.job import JobError
from pipelines.sweep_config import each_once, sweep_folder
from pipelines.sweep_trials import Book, Trial, best_of, read_facts, results
from storage.places import Places

BEST = "best"


def chosen_config(cfg: DictConfig) -> DictConfig:
    """The config of `train` with what the chosen trial was trained with; what is typed now counts more.

    Raises:
        JobError: there is no such sweep or trial, or none is finished.
    """
    if not isinstance(cfg.get("sweep"), str) or "trial" not in cfg:
        raise JobError(
            "`sweep` belongs to `python -m pipelines.sweep`. To train a trial of a sweep: `+experiment=from_sweep sweep=NAME trial=best`"
        )
    trial = _chosen(Path(cfg.output).expanduser().resolve(), cfg.sweep, str(cfg.trial))
    typed = [each for each in HydraConfig.get().overrides.task if not each.lstrip("+").startswith(("sweep=", "trial=", "experiment="))]
    given = [each for each in shlex.split(trial.command)[3:] if not each.startswith("run.name=")]
    return compose("train", each_once([*given, f"run.name={trial.run}-longer", *typed]))


def _chosen(output: Path, sweep: str, name: str) -> Trial:
    folder = sweep_folder(output, sweep)
    facts, book = read_facts(folder), Book.open(folder)
    if name == BEST:
        best = best_of(results(book, facts.store, Places(facts.target, facts.corpus), {}).values(), facts.objective)
        if best is None:
            raise JobError(f"no trial of {sweep} is finished yet: `{facts.resuming}` goes on")
        return best.trial
    if name not in book.trials:
        raise JobError(f"sweep {sweep} has no trial {name!r}. There are: {', '.join(book.trials)}, and `best`")
    return book.trials[name]
