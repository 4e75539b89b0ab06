"""Say what caching and training would take, before anything runs: `python -m pipelines.plan target=qwen3_4b`."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipelines.estimate import TB, Plan, Size, published_size, size, work
from pipelines.job import Job, finish, launch, mendable, notices
from pipelines.machine_checks import GIB, memory_bytes, usable_cores


class PlanJob(Job):
    plan: Plan
    sources: dict[str, str]


@hydra.main(config_path="../conf", config_name="plan", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = PlanJob.from_config(cfg)
    plan = job.plan
    hidden, layers = job.target.shape(notices.print)
    published = published_size(plan, layers, hidden)
    sizes = {codec: size(plan, codec, layers, hidden) for codec in plan.codecs}
    hours = work(plan)
    machine = this_machine(job, sizes)
    inputs = labelled(job, {override.partition("=")[0].lstrip("+") for override in HydraConfig.get().overrides.task})
    finish(
        f"plan: {job.target.name}, {plan.rows:,} rows, {plan.tokens / 1e9:.2f} billion tokens",
        {
            "target": f"H {hidden}, {layers} captured layers",
            "published layout": f"{published.bytes_per_token:,.0f} bytes a token, {terabytes(published.bytes)}",
            **{codec: describe_size(found, plan) for codec, found in sizes.items()},
            "producers": f"{hours.producer_gpu_hours:,.0f} GPU-h: {hours.producer_hours:,.1f} h on {plan.producers}",
            "trainers": f"{hours.trainer_gpu_hours:,.0f} GPU-h: {hours.trainer_hours:,.1f} h on {plan.trainers}, {plan.epochs:g} epochs",
            "ratio": f"{hours.producers_per_trainer:.2f} producers for each trainer keep it busy while the cache grows (train.follow=true)",
            "cost": f"{hours.producer_cost + hours.trainer_cost:,.0f} for GPUs; storage by codec: "
            + ", ".join(f"{codec} {found.storage_cost:,.0f}" for codec, found in sizes.items()),
            "this machine": machine["told"],
            "inputs": "\n".join(f"{name} = {shown(entry['value'])} ({entry['source']})" for name, entry in inputs.items()),
        },
        {
            "target": job.target.name,
            "hidden_size": hidden,
            "layers": layers,
            "tokens": plan.tokens,
            "published": asdict(published),
            "codecs": {codec: asdict(found) for codec, found in sizes.items()},
            "work": asdict(hours),
            "saved_bytes": {codec: published.bytes - found.bytes for codec, found in sizes.items()},
            "machine": machine,
            "inputs": inputs,
        },
        job.output / f"plan-{job.target.name}.json",
    )


def shown(value: Any) -> str:
    """An input as a person would write it."""
    if isinstance(value, dict):
        return ", ".join(f"{codec} {ratio['context']:g} context, {ratio['last_hidden']:g} last hidden" for codec, ratio in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def terabytes(count: float) -> str:
    return f"{count / TB:,.1f} TB" if count >= TB / 10 else f"{count / 1e9:,.1f} GB"


def describe_size(found: Size, plan: Plan) -> str:
    return (
        f"{found.bytes_per_token:,.0f} bytes a token ({found.ratio:.2f} of published), {terabytes(found.bytes)}, {found.shards:,} shards "
        f"of {plan.shard_mib:g} MiB; producers write {found.write_bytes_per_second / 1e9:.2f} GB/s, trainers read "
        f"{found.read_bytes_per_second / 1e9:.2f} GB/s"
    )


def labelled(job: PlanJob, given: set[str]) -> dict[str, dict[str, Any]]:
    """Every input with where it comes from."""
    values = job.plan.model_dump()
    asked = {override.split(".")[1] for override in given if override.startswith("plan.")}
    return {name: {"value": value, "source": "given" if name in asked else job.sources[name]} for name, value in values.items()}


def this_machine(job: PlanJob, sizes: dict[str, Size]) -> dict[str, Any]:
    """What of the plan fits here: rows on the free disk, GPUs, and the rate of the last `cache` of this target if there was one."""
    folder = next(parent for parent in [job.output, *job.output.parents] if parent.is_dir())
    free, (memory, _) = shutil.disk_usage(folder).free, memory_bytes()
    rows = {codec: min(int(free / (found.bytes / job.plan.rows)), job.plan.rows) for codec, found in sizes.items()}
    fits = ", ".join(f"{codec} {count:,} ({count / job.plan.rows:.1%})" for codec, count in rows.items())
    told = [
        f"{usable_cores()} cores, {torch.cuda.device_count()} GPUs, {memory / GIB:.0f} GiB memory, {free / 1e9:,.0f} GB free on the disk",
        f"rows that fit on the disk: {fits}",
    ]
    measured = measured_rate(job.result_path("cache"))
    if measured:
        told.append(
            f"`cache` of this target ran at {measured:,.0f} tokens/s here: {job.plan.tokens / measured / 3600:,.0f} h for the whole plan"
        )
    return {"told": "\n".join(told), "free_bytes": free, "rows_that_fit": rows, "measured_tokens_per_second": measured}


def measured_rate(path: Path) -> float | None:
    """Tokens a second of the last `cache` that had something to do; None without one."""
    try:
        result = json.loads(path.read_text())
        return sum(producer["tokens"] / producer["seconds"] for producer in result["producers"]) or None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


if __name__ == "__main__":
    launch(main)
