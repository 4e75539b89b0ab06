"""Decode held-out prompts losslessly with a drafter and report the accepted length: `python -m pipelines.evaluate run=dspark_markov`."""

import hashlib
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from actors.cluster import cluster
from actors.decoder import Decoded, DecoderSettings, Prompt, decode_prompts
from corpus.conversation import Conversation
from decoding.metrics import acceptance_metrics, divide
from decoding.settings import Generation, Round, SamplingSettings, Seconds
from pipelines.job import Job, JobError, finish, launch, mendable, notices, progress, write_json
from pipelines.machine import git_revision
from pipelines.machine_checks import usable_cores
from pipelines.prepare import read_conversations
from pipelines.report import (
    Acceptance,
    DomainResult,
    EvaluationReport,
    Facts,
    SampleText,
    Settings,
    StageTime,
    Timing,
    bootstrap_tau,
    token_pieces,
    training_points,
    write_report,
)
from pipelines.target import Target, describe
from pipelines.train import MetricsFile
from storage.checkpoint import DrafterFiles, load_drafter
from storage.contract import require_match
from storage.object_store import ObjectStore


class EvaluateConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    temperature: float = Field(ge=0, le=2)
    max_new_tokens: int = Field(ge=1)
    prompts: int | None = Field(ge=1)
    seed: int
    batch_size: int = Field(ge=1)
    actors: int | None = Field(ge=1)
    threads: int | None = Field(ge=1)
    gpus: float | None = Field(ge=0)
    dtype: str = Field(pattern="^(bfloat16|float32)$")
    samples: int = Field(ge=0)


class EvaluateJob(Job):
    run: str
    compare: tuple[str, ...]
    evaluate: EvaluateConfig


@hydra.main(config_path="../conf", config_name="evaluate", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = EvaluateJob.from_config(cfg)
    store = job.open_store()
    target = job.target.resolve(notices.print)
    conversations = read_conversations(store.child(job.places.prompts), "heldout")
    conversations = sorted(conversations, key=lambda conversation: conversation.id)[: job.evaluate.prompts]
    if not conversations:
        raise JobError(f"corpus {job.corpus.name} has no held-out prompts. Set corpus.heldout or corpus.heldout_share and prepare again.")
    outcomes: dict[str, list[Decoded]] = {}
    drafters: dict[str, DrafterFiles] = {}
    for run in (job.run, *job.compare):
        drafters[run] = checked_drafter(store.child(f"{job.places.run(run)}/drafter"), target)
        outcomes[run] = decoded(job, run, target, drafters[run], conversations, store)
    report = make_report(job, target, drafters[job.run], conversations, outcomes)
    folder = job.output / job.places.run(job.run) / "evaluation"
    page = write_report(report, folder)
    main_metrics = acceptance_metrics(outcome.drafted for outcome in outcomes[job.run])
    shown = divide(main_metrics)
    ratio = report.timing.ratio
    finish(
        f"{job.run} drafting for {job.target.name}, temperature {job.evaluate.temperature:g}",
        {
            "tau": f"{report.tau_pooled.value:.2f} tokens a round (95 % {report.tau_pooled.low:.2f} to {report.tau_pooled.high:.2f})"
            if report.tau_pooled.low is not None and report.tau_pooled.high is not None
            else f"{report.tau_pooled.value:.2f} tokens a round",
            "tau by request": f"{report.tau_per_request.value:.2f}",
            "accept_cond@k": _positions(shown, "accept_cond"),
            "accept_prefix@k": _positions(shown, "accept_prefix"),
            "speed": f"{ratio:.2f} x plain decoding" if ratio else "-",
            **{f"tau of {run}": f"{divide(acceptance_metrics(o.drafted for o in outcomes[run]))['tau']:.2f}" for run in job.compare},
            "same text": same_text(outcomes[job.run], job.evaluate.temperature),
            "report": str(page),
        },
        {
            "target": describe(target),
            "run": job.run,
            "settings": job.evaluate.model_dump(),
            "metrics": {run: divide(acceptance_metrics(o.drafted for o in outcome)) for run, outcome in outcomes.items()},
            "counts": {run: acceptance_metrics(o.drafted for o in outcome) for run, outcome in outcomes.items()},
            "wall_clock_ratio": ratio,
            "differing_texts": sum(o.drafted.tokens != o.plain.tokens for o in outcomes[job.run])
            if job.evaluate.temperature == 0
            else None,
            "differing_gaps": [o.gap for o in outcomes[job.run] if o.gap is not None],
            "report": str(page),
        },
        folder / "evaluate.json",
    )


def checked_drafter(folder: ObjectStore, target: Target) -> DrafterFiles:
    """The drafter's files, refused where they belong to another target."""
    if not folder.exists("contract.json"):
        raise JobError(f"{folder.settings.root} holds no finished drafter. Run `python -m pipelines.train` with this run's name first.")
    files = load_drafter(folder)
    require_match(
        target.identity, files.contract.target, folder.settings.root, "Evaluate a drafter with the target that it was trained for"
    )
    if files.layout.mask_token_id != target.mask_token_id:
        raise JobError(
            f"{folder.settings.root} was trained with mask token {files.layout.mask_token_id}, this run has {target.mask_token_id}: "
            f"set target.mask_token={files.layout.mask_token_id}"
        )
    return files


def decoded(
    job: EvaluateJob, run: str, target: Target, drafter: DrafterFiles, conversations: Sequence[Conversation], store: ObjectStore
) -> list[Decoded]:
    """Decode, or take the recorded outcome of the very same drafter, prompts and settings."""
    prompts = [
        Prompt(int(conversation.id[:12], 16), tuple(target.template.prompt_ids(conversation.rounds()[0], job.target.enable_thinking)))
        for conversation in conversations
    ]
    sampling = SamplingSettings(job.evaluate.temperature, job.evaluate.max_new_tokens, target.template.stop_ids, job.evaluate.seed)
    key = outcome_key(drafter, prompts, sampling, job.evaluate)
    record = job.output / job.places.run(run) / "evaluation" / "rounds" / f"{key}.json"
    if record.is_file():
        notices.print(f"{run}: decoded before, taken from {record}")
        return [Decoded(generation(drafted), generation(plain), gap) for drafted, plain, gap in json.loads(record.read_text())["outcomes"]]
    gpus = torch.cuda.device_count()
    actors = job.evaluate.actors or max(gpus, 1)
    threads = job.evaluate.threads or max((job.cluster.cpus or usable_cores()) // actors, 1)
    settings = DecoderSettings(
        actors=actors,
        threads=threads,
        gpus=job.evaluate.gpus if job.evaluate.gpus is not None else (1.0 if gpus else 0.0),
        dtype=job.evaluate.dtype,
        batch_size=job.evaluate.batch_size,
    )
    with cluster(job.cluster), progress() as bar:
        task = bar.add_task(f"decoding {run}", total=2 * len(prompts), note="with the drafter, and plainly")
        outcomes = decode_prompts(
            str(target.folder),
            drafter.contract.capture.layer_ids,
            store.child(f"{job.places.run(run)}/drafter"),
            prompts,
            sampling,
            settings,
            lambda count: bar.update(task, advance=count),
        )
    write_json(record, {"outcomes": [[asdict(outcome.drafted), asdict(outcome.plain), outcome.gap] for outcome in outcomes]})
    return outcomes


def generation(value: dict[str, Any]) -> Generation:
    """A recorded generation."""
    rounds = [Round(**{**round_, "confidence": tuple(round_["confidence"])}) for round_ in value["rounds"]]
    return Generation(value["tokens"], rounds, value["finish_reason"], Seconds(**value["seconds"]))


def outcome_key(drafter: DrafterFiles, prompts: Sequence[Prompt], sampling: SamplingSettings, settings: EvaluateConfig) -> str:
    """Changes with everything that can change what is decoded or how long it takes."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(drafter.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps([[prompt.number, *prompt.token_ids] for prompt in prompts]).encode())
    digest.update(repr((sampling, settings.dtype, settings.batch_size, settings.actors, settings.threads)).encode())
    return digest.hexdigest()


def make_report(
    job: EvaluateJob,
    target: Target,
    drafter: DrafterFiles,
    conversations: Sequence[Conversation],
    outcomes: dict[str, list[Decoded]],
) -> EvaluationReport:
    """All figures of the page, from what was decoded."""
    own = outcomes[job.run]
    generations = [outcome.drafted for outcome in own]
    pooled, per_request = taus(generations)
    domains = []
    for domain in sorted({conversation.domain for conversation in conversations}):
        part = [outcome for outcome, conversation in zip(own, conversations, strict=True) if conversation.domain == domain]
        part_pooled, part_request = taus([outcome.drafted for outcome in part])
        domains.append(
            DomainResult(
                domain=domain,
                prompts=len(part),
                tokens=sum(len(outcome.drafted.tokens) for outcome in part),
                rounds=sum(len(outcome.drafted.rounds) for outcome in part),
                tau_pooled=part_pooled,
                tau_per_request=part_request,
                acceptance=Acceptance.from_metrics(domain, acceptance_metrics(outcome.drafted for outcome in part)),
                wall_clock_ratio=timing(part).ratio,
            )
        )
    run_folder = job.output / job.places.run(job.run)
    return EvaluationReport(
        title=f"{job.run} drafting for {job.target.name}",
        settings=Settings(
            temperature=job.evaluate.temperature,
            max_new_tokens=job.evaluate.max_new_tokens,
            batch_size=job.evaluate.batch_size,
            block_length=drafter.layout.block_length,
            seed=job.evaluate.seed,
            dtype=job.evaluate.dtype,
        ),
        facts=Facts(
            target=f"{job.target.model}, layers {list(drafter.contract.capture.layer_ids)}",
            drafter={key: str(value) for key, value in drafter.config.items() if key in _DRAFTER_FACTS},
            contract_fingerprint=hashlib.sha256(drafter.contract.to_json().encode()).hexdigest()[:16],
            machine=machine(),
            date=time.strftime("%Y-%m-%d"),
            git_revision=git_revision(),
            command=f"python -m pipelines.evaluate {shlex.join(sys.argv[1:])}",
            versions={package: version(package) for package in ("torch", "transformers", "ray")},
        ),
        prompts=len(own),
        tokens=sum(len(generation.tokens) for generation in generations),
        rounds=sum(len(generation.rounds) for generation in generations),
        tau_pooled=pooled,
        tau_per_request=per_request,
        timing=timing(own),
        acceptance=tuple(
            Acceptance.from_metrics(run, acceptance_metrics(outcome.drafted for outcome in outcome_list))
            for run, outcome_list in outcomes.items()
        ),
        domains=tuple(domains),
        training=training_points(MetricsFile.read(run_folder / "metrics.jsonl")),
        stages=stage_times(job),
        samples=samples(job, target, conversations, generations),
        notes=notes(job, own, conversations),
    )


_DRAFTER_FACTS = ("algorithm", "layout", "num_layers", "block_length", "head", "head_rank", "confidence", "hidden_size")


def taus(generations: Sequence[Generation]) -> tuple[Any, Any]:
    """(pooled, per request) with bootstrap intervals over requests."""
    return bootstrap_tau(
        [sum(round_.committed for round_ in generation.rounds) for generation in generations],
        [len(generation.rounds) for generation in generations],
    )


def timing(outcomes: Sequence[Decoded]) -> Timing:
    """Whole requests, prompts included, with the drafter and plainly."""
    return Timing(
        plain_seconds=sum(outcome.plain.seconds.total for outcome in outcomes),
        plain_tokens=sum(len(outcome.plain.tokens) for outcome in outcomes),
        drafted_seconds=sum(outcome.drafted.seconds.total for outcome in outcomes),
        drafted_tokens=sum(len(outcome.drafted.tokens) for outcome in outcomes),
        draft_seconds=sum(outcome.drafted.seconds.draft for outcome in outcomes),
        verify_seconds=sum(outcome.drafted.seconds.verify for outcome in outcomes),
    )


def samples(
    job: EvaluateJob, target: Target, conversations: Sequence[Conversation], generations: Sequence[Generation]
) -> tuple[SampleText, ...]:
    """The median text of each domain by its own tau, then others: neither the best nor the worst."""
    texts = []
    for conversation, generation in zip(conversations, generations, strict=True):
        pieces = token_pieces(target.template.decode, generation.tokens)
        question = conversation.rounds()[0][-1].content
        if generation.rounds:
            texts.append(SampleText.from_rounds(conversation.domain, question, pieces, generation.rounds))
    chosen: list[SampleText] = []
    for domain in sorted({text.domain for text in texts}):
        own = sorted((text for text in texts if text.domain == domain), key=lambda text: text.tau or 0.0)
        chosen.append(own[len(own) // 2])
    return tuple(chosen[: job.evaluate.samples])


def same_text(outcomes: Sequence[Decoded], temperature: float) -> str:
    """At temperature 0 drafted and plain text are the same, but for near-ties that rounding decides."""
    if temperature > 0:
        return "equal in distribution (sampled)"
    same = sum(outcome.drafted.tokens == outcome.plain.tokens for outcome in outcomes)
    gaps = [outcome.gap for outcome in outcomes if outcome.gap is not None]
    parted = f"; the others part where the target's two best logits are at most {max(gaps):.2g} apart" if gaps else ""
    return f"{same} of {len(outcomes)} texts equal plain greedy decoding token for token{parted}"


def notes(job: EvaluateJob, outcomes: Sequence[Decoded], conversations: Sequence[Conversation]) -> tuple[str, ...]:
    """What a reader must know beside the figures."""
    sources = sorted({conversation.source for conversation in conversations})
    told = [f"Held-out prompts of corpus {job.corpus.name} ({', '.join(sources)}): of the training prompts' kinds, hence in-distribution."]
    if job.evaluate.temperature == 0 and job.evaluate.dtype != "float64":
        told.append(
            f"{same_text(outcomes, 0.0)}. In {job.evaluate.dtype} a forward pass over several tokens rounds otherwise than one over a "
            "single token, so a near-tie of the target's two best tokens can fall either way."
        )
    return tuple(told)


def stage_times(job: EvaluateJob) -> tuple[StageTime, ...]:
    """Wall times that the demo recorded for the stages before this one."""
    path = job.result_path("stages")
    if not path.is_file():
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


def _positions(shown: dict[str, float | None], name: str) -> str:
    values: list[float] = []
    while (value := shown.get(f"{name}@{len(values) + 1}")) is not None and not math.isnan(value):
        values.append(value)
    return " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    launch(main)
