"""Decode prompts losslessly with drafters and report the accepted length: `python -m pipelines.evaluate run=dspark_markov benchmarks=all`.

Finished prompts are kept in files: stopped and started again, it goes on where it was.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import hydra
from omegaconf import DictConfig

from actors.cluster import cluster
from actors.decoder import DecoderPool
from decoding.metrics import acceptance_metrics, divide
from pipelines.drafters import Choice, chosen_drafters
from pipelines.evaluate_config import EvaluateJob, LatencyConfig
from pipelines.evaluation_report import Evaluated, make_report, same_text
from pipelines.job import JobError, finish, launch, mendable, notices, progress, write_json, write_text
from pipelines.outcomes import OutcomeFiles, Work, collect, drafter_key, recorder
from pipelines.prepare import read_conversations
from pipelines.prompt_sets import PromptSet, benchmark_sets, heldout_set
from pipelines.report import write_report
from pipelines.report_data import DrafterResult, Estimate, EvaluationReport, HeadCost
from pipelines.tables import COLUMNS, long_rows, markdown_report, round_profile
from pipelines.target import Target, describe
from pipelines.tracking import log_table
from storage.object_store import ObjectStore


@hydra.main(config_path="../conf", config_name="evaluate", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = EvaluateJob.from_config(cfg)
    store = job.open_store()
    target = job.target.resolve(notices.print)
    sets = prompt_sets(job, target, store)
    choices = chosen_drafters(job.runs or (() if job.drafters else (job.run,)), job.drafters, job.places, store, target, notices.print)
    found = evaluated(job, target, sets, choices)
    main_name = next(iter(choices))
    report = make_report(job, target, found)
    folder = job.output / choices[main_name].place / job.kind
    page = write_report(report, folder)
    write_text(folder / "report.md", markdown_report(report))
    write_json(folder / "report.json", report.to_dict())
    log_table(job.tracking, report.title, folder, "evaluation", COLUMNS, long_rows(report), report.facts.command or "")
    finish(report.title, summary(job, report, found, page), result(job, target, report, found, page), folder / "evaluate.json")


def prompt_sets(job: EvaluateJob, target: Target, store: ObjectStore) -> tuple[PromptSet, ...]:
    """The benchmarks that were asked for, else the corpus's held-out prompts."""
    settings = job.evaluate
    if job.benchmarks:
        names = None if job.benchmarks == ("all",) else job.benchmarks
        return benchmark_sets(job.benchmarks_from, names, settings.rows, target, settings.max_new_tokens)
    conversations = read_conversations(store.child(job.places.prompts), "heldout")
    if not conversations:
        raise JobError(f"corpus {job.corpus.name} has no held-out prompts. Set corpus.heldout or corpus.heldout_share and prepare again.")
    conversations = sorted(conversations, key=lambda conversation: conversation.id)[: settings.prompts]
    return (heldout_set(conversations, job.corpus.name, target, settings.max_new_tokens),)


def evaluated(job: EvaluateJob, target: Target, sets: tuple[PromptSet, ...], choices: Mapping[str, Choice]) -> Evaluated:
    """Decode what is not decoded yet, and measure what the heads cost where that is asked for."""
    decoders, sampling = job.decoders(), job.evaluate.sampling(target.template.stop_ids)
    how = [decoders.dtype, decoders.batch_size, decoders.draft_tokens]
    keys = {name: drafter_key(target.identity, choice.tensors, choice.facts, sampling, how) for name, choice in choices.items()}
    files = OutcomeFiles(job.output / target.config.name / "decoded", keys, decoders.threads)
    work = Work.plan(sets, tuple(choices), decoders.batch_size, files)
    latency = job.evaluate.latency
    costs: tuple[HeadCost, ...] = ()
    if work.groups or latency.contexts:
        stores = {name: choice.store for name, choice in choices.items() if choice.store is not None}
        with ExitStack() as stack:
            stack.enter_context(cluster(job.cluster))
            bar = stack.enter_context(progress())
            task = bar.add_task("decoding", total=work.decodings, note=f"with {', '.join(choices)}, and plainly")
            pool = DecoderPool(str(target.folder), stores, decoders, len(work.groups))
            if work.groups:
                pool.decode(work.groups, sampling, recorder(work, files, lambda count: bar.update(task, advance=count)))
            if latency.contexts:
                costs = tuple(head_cost(pool, name, latency) for name, choice in choices.items() if choice.store is not None)
    else:
        notices.print(f"decoded before, taken from {files.folder}")
    return Evaluated(sets, choices, collect(sets, tuple(choices), decoders.batch_size, files), costs, work.decodings)


def head_cost(pool: DecoderPool, name: str, latency: LatencyConfig) -> HeadCost:
    """Means over the context lengths."""
    costs = pool.round_costs(name, latency.batch, latency.contexts, latency.repeats)
    return HeadCost(
        name,
        latency.batch,
        latency.contexts,
        mean(cost.base for cost in costs),
        mean(cost.draft for cost in costs),
        mean(cost.verify for cost in costs),
    )


def summary(job: EvaluateJob, report: EvaluationReport, found: Evaluated, page: Path) -> dict[str, str]:
    """The closing table."""
    name = next(iter(found.choices))
    own = [outcome for part in found.sets for outcome in found.outcomes[name][part.name]]
    shown = divide(acceptance_metrics(outcome.drafted for outcome in own))
    ratio, other = report.timing.ratio, report.timing.other_share
    lines = {
        "tau": f"{_interval(report.tau_pooled)} tokens a round",
        "tau by request": f"{report.tau_per_request.value:.2f}",
        "accept_cond@k": _positions(shown, "accept_cond"),
        "accept_prefix@k": _positions(shown, "accept_prefix"),
        "speed": f"{ratio:.2f} x plain decoding" if ratio else "-",
        "outside the models": f"{other:.1%} of a round's time" if other is not None else "-",
    }
    if len(found.sets) > 1:
        lines["tau_macro"] = _interval(report.drafters[0].tau_macro)
        lines |= {f"tau on {score.name}": _interval(score.tau_pooled) for score in report.drafters[0].benchmarks}
    lines |= {f"tau of {result.name}": _macro_or_pooled(result) for result in report.drafters[1:]}
    lines |= {f"{gain.drafter} over {gain.over}": f"{gain.value.value:+.1%}" for gain in report.gains}
    return {**lines, "same text": same_text(own, job.evaluate.temperature), "report": str(page)}


def result(job: EvaluateJob, target: Target, report: EvaluationReport, found: Evaluated, page: Path) -> dict[str, Any]:
    """The result JSON."""
    name = next(iter(found.choices))
    own = [outcome for part in found.sets for outcome in found.outcomes[name][part.name]]
    counts = {
        each: acceptance_metrics(outcome.drafted for part in found.sets for outcome in found.outcomes[each][part.name])
        for each in found.choices
    }
    greedy = job.evaluate.temperature == 0
    return {
        "target": describe(target),
        "run": name,
        "settings": job.evaluate.model_dump(),
        "sets": {part.name: {"origin": part.origin, "domain": part.domain, "rows": len(part.prompts)} for part in found.sets},
        "metrics": {
            each: {**divide(counted), "tau_macro": result.tau_macro.value}
            for (each, counted), result in zip(counts.items(), report.drafters, strict=True)
        },
        "counts": counts,
        "rows": long_rows(report),
        "gains": [asdict(gain) for gain in report.gains],
        "head_costs": [{**asdict(cost), "overhead": cost.overhead} for cost in report.head_costs],
        "wall_clock_ratio": report.timing.ratio,
        "round_profile": {each.name: round_profile(each) for each in report.drafters},
        "differing_texts": sum(outcome.drafted.tokens != outcome.plain.tokens for outcome in own) if greedy else None,
        "differing_gaps": [outcome.gap for outcome in own if outcome.gap is not None],
        "recorded": found.decoded_now == 0,
        "report": str(page),
    }


def _macro_or_pooled(result: DrafterResult) -> str:
    return _interval(result.tau_macro) + (", macro" if len(result.benchmarks) > 1 else "")


def _interval(estimate: Estimate) -> str:
    known = estimate.low is not None and estimate.high is not None
    return f"{estimate.value:.2f}" + (f" (95 % {estimate.low:.2f} to {estimate.high:.2f})" if known else "")


def _positions(shown: dict[str, float | None], name: str) -> str:
    values: list[float] = []
    while (value := shown.get(f"{name}@{len(values) + 1}")) is not None and not math.isnan(value):
        values.append(value)
    return " ".join(f"{value:.2f}" for value in values) or "-"


if __name__ == "__main__":
    launch(main, rename={"drafter": "drafters"})
