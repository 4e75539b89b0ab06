"""The report of an evaluation, made from what was decoded."""

import hashlib
import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from actors.decoder import PLAIN, Decoded
from decoding.metrics import acceptance_metrics
from pipelines.drafters import Choice
from pipelines.evaluate_config import EvaluateJob
from pipelines.machine import git_revision
from pipelines.machine_checks import usable_cores
from pipelines.metrics_file import MetricsFile
from pipelines.outcomes import Outcomes
from pipelines.prompt_sets import HELDOUT, PromptSet, mini_note
from pipelines.report_data import (
    Acceptance,
    DomainResult,
    EvaluationReport,
    Facts,
    HeadCost,
    Reliability,
    Settings,
    StageTime,
    reliabilities_from,
    training_points,
)
from pipelines.sample_text import SampleText, token_pieces
from pipelines.scores import by_domain, drafter_result, gains, score, taus, threshold_sweeps, timing
from pipelines.target import Target
from storage.calibration import drafter_hash


@dataclass(frozen=True)
class Evaluated:
    """Everything that a report is made of."""

    sets: tuple[PromptSet, ...]
    choices: Mapping[str, Choice]
    outcomes: Outcomes
    costs: tuple[HeadCost, ...]
    decoded_now: int


def make_report(job: EvaluateJob, target: Target, found: Evaluated) -> EvaluationReport:
    """All figures of the page, from what was decoded."""
    name, choice = next(iter(found.choices.items()))
    sets, results = found.sets, found.outcomes[name]
    own = [outcome for part in sets for outcome in results[part.name]]
    generations = [outcome.drafted for outcome in own]
    pooled, per_request = taus(generations)
    compared = tuple(drafter_result(each, found.choices[each].shape, sets, found.outcomes[each]) for each in found.choices)
    settings = job.evaluate
    return EvaluationReport(
        title=f"{name} drafting for {job.target.name}" if choice.store else f"{job.target.name} without a drafter",
        settings=Settings(
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            block_length=compared[0].block_length,
            seed=settings.seed,
            dtype=settings.dtype,
        ),
        facts=facts(job, choice),
        prompts=len(own),
        tokens=sum(len(generation.tokens) for generation in generations),
        rounds=sum(len(generation.rounds) for generation in generations),
        tau_pooled=pooled,
        tau_per_request=per_request,
        timing=timing(own),
        acceptance=tuple(overall_acceptance(each, found) for each in found.choices if each != PLAIN),
        domains=tuple(domain_result(domain, outcomes) for domain, outcomes in by_domain(sets, results).items()),
        training=training_points(MetricsFile.read(job.output / choice.place / "metrics.jsonl")),
        stages=stage_times(job),
        samples=samples(job, target, sets, results),
        notes=notes(job, sets, own),
        prompts_are="held-out prompts" if sets[0].name == HELDOUT else f"prompts of {len(sets)} benchmark{'s' * (len(sets) > 1)}",
        drafters=compared,
        gains=gains(sets, found.outcomes) if len(found.choices) > 1 and choice.store else (),
        sweeps=threshold_sweeps(sets, results),
        head_costs=found.costs,
        reliability=calibrated(job, choice),
    )


def calibrated(job: EvaluateJob, choice: Choice) -> tuple[Reliability, ...]:
    """Reliability diagrams, where `calibrate` has measured this very drafter at this temperature."""
    path = job.output / choice.place / "calibration" / "calibrate.json"
    if choice.store is None or choice.contract is None or not path.is_file():
        return ()
    found = json.loads(path.read_text())
    same = found.get("drafter") == drafter_hash(choice.store) and found["settings"]["temperature"] == job.evaluate.temperature
    return reliabilities_from(found["reliability"]) if same else ()


def overall_acceptance(name: str, found: Evaluated) -> Acceptance:
    outcomes = (outcome.drafted for part in found.sets for outcome in found.outcomes[name][part.name])
    return Acceptance.from_metrics(name, acceptance_metrics(outcomes))


def domain_result(domain: str, outcomes: Sequence[Decoded]) -> DomainResult:
    part = score(domain, domain, outcomes)
    return DomainResult(
        domain=domain,
        prompts=part.prompts,
        tokens=part.tokens,
        rounds=part.rounds,
        tau_pooled=part.tau_pooled,
        tau_per_request=part.tau_per_request,
        acceptance=part.acceptance,
        wall_clock_ratio=part.timing.ratio,
    )


def facts(job: EvaluateJob, choice: Choice) -> Facts:
    layers = f", layers {list(choice.layer_ids)}" if choice.layer_ids else ""
    return Facts(
        target=f"{job.target.model}{layers}",
        drafter={key: str(value) for key, value in choice.facts.items() if key in _DRAFTER_FACTS},
        contract_fingerprint=hashlib.sha256(choice.contract.to_json().encode()).hexdigest()[:16] if choice.contract else "none",
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
        git_revision=git_revision(),
        command=f"python -m pipelines.evaluate {shlex.join(sys.argv[1:])}",
        versions={package: version(package) for package in ("torch", "transformers", "ray")},
    )


_DRAFTER_FACTS = ("algorithm", "layout", "num_layers", "block_length", "head", "head_rank", "confidence", "hidden_size")


def samples(
    job: EvaluateJob, target: Target, sets: Sequence[PromptSet], results: Mapping[str, Sequence[Decoded]]
) -> tuple[SampleText, ...]:
    """The median text of each domain by its own tau: neither the best nor the worst."""
    texts = []
    for part in sets:
        for conversation, outcome in zip(part.conversations, results[part.name], strict=True):
            if outcome.drafted.rounds:
                texts.append((conversation, outcome.drafted))
    chosen: list[SampleText] = []
    for domain in sorted({conversation.domain for conversation, _ in texts}):
        own = sorted(
            (pair for pair in texts if pair[0].domain == domain),
            key=lambda pair: sum(round_.committed for round_ in pair[1].rounds) / len(pair[1].rounds),
        )
        conversation, generation = own[len(own) // 2]
        pieces = token_pieces(target.template.decode, generation.tokens)
        question = conversation.rounds()[0][-1].content
        chosen.append(SampleText.from_rounds(domain, question, pieces, generation.rounds, lambda token: target.template.decode([token])))
    return tuple(chosen[: job.evaluate.samples])


def same_text(outcomes: Sequence[Decoded], temperature: float) -> str:
    """At temperature 0 drafted and plain text are the same, but for near-ties that rounding decides."""
    if temperature > 0:
        return "equal in distribution (sampled)"
    same = sum(outcome.drafted.tokens == outcome.plain.tokens for outcome in outcomes)
    gaps = [outcome.gap for outcome in outcomes if outcome.gap is not None]
    parted = f"; the others part where the target's two best logits are at most {max(gaps):.2g} apart" if gaps else ""
    return f"{same} of {len(outcomes)} texts equal plain greedy decoding token for token{parted}"


def notes(job: EvaluateJob, sets: Sequence[PromptSet], outcomes: Sequence[Decoded]) -> tuple[str, ...]:
    """What a reader must know beside the figures."""
    told = list(mini_note(sets))
    if sets[0].name == HELDOUT:
        sources = sorted({conversation.source for conversation in sets[0].conversations})
        kinds = f"Held-out prompts of corpus {job.corpus.name} ({', '.join(sources)})"
        told.append(f"{kinds}: of the training prompts' kinds, hence in-distribution.")
    elif job.evaluate.rows is not None:
        told.append(f"The first {job.evaluate.rows} rows of each benchmark at most, not the published protocol's numbers.")
    if job.evaluate.draft_tokens is not None:
        told.append(f"At most {job.evaluate.draft_tokens} tokens are drafted and verified a round, whatever the block length.")
    if job.evaluate.temperature == 0 and job.evaluate.dtype != "float64":
        told.append(
            f"{same_text(outcomes, 0.0)}. In {job.evaluate.dtype} a forward pass over several tokens rounds otherwise than one over a "
            "single token, so a near-tie of the target's two best tokens can fall either way."
        )
    return tuple(told)


def stage_times(job: EvaluateJob) -> tuple[StageTime, ...]:
    """Wall times that the demo recorded for the stages before this one."""
    path = job.result_path("stages")
    if job.benchmarks or not path.is_file():
        return ()
    return tuple(StageTime(stage["stage"], stage["seconds"], stage["skipped"]) for stage in json.loads(path.read_text())["stages"])


def machine() -> str:
    """Processor and cores, or the GPU."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.is_file()
        else []
    )
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{names[0] if names else platform.processor()}, {usable_cores()} cores{amx}"
