"""Cache the target's hidden states for the answered corpus: `python -m pipelines.cache target=qwen3_8b`.

Resumes after any crash, and extends a finished cache by what `regenerate` has added. `--stat` says what is in it, `--verify` whether it is
whole, `--gc` removes what belongs to nobody.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Literal

import hydra
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress, TaskID

from actors.answers import AnswerStore
from actors.brought_answers import SETTING
from actors.caching import run_cache
from actors.cluster import cluster
from actors.engines.base import AnswerSettings, EngineSettings
from actors.ledger import LedgerSettings, LedgerStatus, committed_status
from actors.prompts import PromptStore
from actors.recheck import RecheckRecipe
from actors.rows import CacheRecipe, OnePass, ProducerSettings, claim_source
from pipelines.cache_upkeep import UpkeepConfig, gc, require_cache, stat, verify
from pipelines.job import Job, JobError, finish, launch, mendable, notices, progress
from pipelines.machine import engine_count
from pipelines.prepare import read_conversations
from pipelines.target import Target, describe
from storage.contract import Capture, Contract, ensure_contract, mask_rule
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.upkeep import published_bytes


class CacheConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    codec: Literal["raw", "lossless", "fp8"]
    max_length: int = Field(ge=2)
    keep_truncated: bool
    last_hidden_rows: Literal["supervised", "all"]
    shard_mib: float = Field(gt=0)


class ProducerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    engine: Literal["vllm", "hf"]
    count: int | None = Field(ge=1)
    threads: int = Field(ge=1)
    gpus: float | None = Field(ge=0)
    dtype: Literal["bfloat16", "float32"]
    batch_tokens: int = Field(ge=1)
    batch_rows: int = Field(ge=1)
    kv_cache_gib: int = Field(ge=1)
    tensor_parallel: int = Field(ge=1)
    one_pass: bool
    pending_mib: int = Field(ge=1)


class LeaseConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    rows: int = Field(ge=1)
    seconds: float = Field(gt=0)
    attempts: int = Field(ge=1)


class CacheJob(Job):
    mode: Literal["build", "stat", "verify", "gc"]
    cache: CacheConfig
    producer: ProducerConfig
    lease: LeaseConfig
    upkeep: UpkeepConfig


@hydra.main(config_path="../conf", config_name="cache", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = CacheJob.from_config(cfg)
    store = job.open_store()
    if job.mode != "build":
        look_after(job, store)
        return
    # A long job bears an outage of minutes.
    cache = ObjectStore(replace(store.child(job.places.cache).settings, attempts=14))
    answers = AnswerStore(store.child(job.places.answers))
    if not job.producer.one_pass and not answers.rows:
        raise JobError(
            f"{answers.store.settings.root} holds no answers yet. Run `python -m pipelines.regenerate` with the same target and corpus, "
            "or let them be given while caching: `producer.one_pass=true`."
        )
    prompts = read_conversations(store.child(job.places.prompts), "train") if job.producer.one_pass else []
    if any(conversation.brings_answers for conversation in prompts):
        raise JobError(
            f"corpus {job.corpus.name} was prepared with corpus.answers=keep, and producer.one_pass=true answers every row anew. Run "
            "`python -m pipelines.regenerate` and `cache` without one_pass, or `prepare` without corpus.answers=keep."
        )
    target = job.target.resolve(notices.print)
    recipe = make_recipe(job, target, cache, answers)
    ensure_contract(cache, recipe.contract)
    claim_source(recipe)
    rows = PromptStore(cache).add(prompts) if job.producer.one_pass else answers.rows
    started = time.perf_counter()
    ledger = LedgerSettings(job.lease.rows, job.lease.seconds, job.lease.attempts)
    status, reports = committed_status(cache, rows), list[dict[str, float]]()
    if status.done < rows:
        with cluster(job.cluster), progress() as bar:
            task = bar.add_task("caching", total=rows, completed=status.done, note="starting the engines")
            status, reports = run_cache(recipe, rows, ledger, _watch(bar, task, status.tokens))
    summarize(job, target, cache, status, reports, time.perf_counter() - started)


def look_after(job: CacheJob, store: ObjectStore) -> None:
    """The modes that cache nothing."""
    cache, result = store.child(job.places.cache), job.result_path(f"cache_{job.mode}")
    require_cache(cache)
    if job.mode == "stat":
        stat(cache, job.upkeep, result)
    elif job.mode == "gc":
        gc(cache, job.upkeep, result)
    else:
        answers, target = AnswerStore(store.child(job.places.answers)), job.target.resolve(notices.print)
        made = make_recipe(job, target, cache, answers)
        recheck = RecheckRecipe(cache, made.contract, made.engine, made.settings.cpus, made.settings.gpus)
        verify(cache, answers, target, recheck, job.cluster, job.upkeep, result)


def _watch(bar: Progress, task: TaskID, tokens_before: int) -> Callable[[LedgerStatus], None]:
    started = time.perf_counter()

    def on_status(status: LedgerStatus) -> None:
        rate = (status.tokens - tokens_before) / max(time.perf_counter() - started, 1e-9)
        failed = f"; [red]{status.failed_rows} failed[/]" if status.failed else ""
        told = f"{rate:.0f} tokens/s; {status.bytes / 2**20:.0f} MiB; {status.skipped} skipped{failed}"
        bar.update(task, completed=status.done, note=told)

    return on_status


def make_recipe(job: CacheJob, target: Target, cache: ObjectStore, answers: AnswerStore) -> CacheRecipe:
    """What the producers need to know, from the job's config."""
    producer = job.producer
    producers, gpus = engine_count(job.cluster, producer.count, producer.gpus, producer.threads, producer.tensor_parallel)
    capture = Capture(
        layer_ids=target.layer_ids,
        max_length=job.cache.max_length,
        codec=job.cache.codec,
        last_hidden_rows=job.cache.last_hidden_rows,
        mask_rule=mask_rule(job.cache.keep_truncated, not producer.one_pass and SETTING in answers.stored_settings()),
        mask_token_id=target.mask_token_id,
    )
    return CacheRecipe(
        cache=cache,
        answers=answers.store,
        contract=Contract(target.identity, capture),
        engine=EngineSettings(
            model=str(target.folder),
            layer_ids=target.layer_ids,
            engine=producer.engine,
            dtype=producer.dtype,
            max_length=job.cache.max_length,
            batch_tokens=producer.batch_tokens,
            batch_rows=producer.batch_rows,
            threads=producer.threads,
            tensor_parallel=producer.tensor_parallel,
            kv_cache_gib=producer.kv_cache_gib,
            answers=AnswerSettings(**job.target.sampling.model_dump(), stop_token_ids=target.template.stop_ids)
            if producer.one_pass
            else None,
        ),
        mask_token_id=target.mask_token_id,
        stop_ids=target.template.stop_ids,
        keep_truncated=job.cache.keep_truncated,
        one_pass=OnePass(job.target.enable_thinking) if producer.one_pass else None,
        settings=ProducerSettings(
            producers=producers,
            cpus=producer.threads,
            gpus=gpus,
            shard_bytes=int(job.cache.shard_mib * 2**20),
            pending_bytes=producer.pending_mib << 20,
        ),
    )


def summarize(
    job: CacheJob, target: Target, cache: ObjectStore, status: LedgerStatus, reports: list[dict[str, float]], seconds: float
) -> None:
    """Compact the commits into a manifest, say what is in the cache, and exit with 1 if rows failed."""
    manifest = Manifest.current(cache)
    manifest.save(cache)
    skipped = manifest.tally.skipped
    tokens, supervised = max(status.tokens, 1), int(manifest.supervised.sum())
    published = published_bytes(len(target.layer_ids), target.identity.hidden_size)
    worked = sum(report["tokens"] for report in reports)
    rate = f"{worked / seconds:.0f} tokens/s, engine start included" if worked else "nothing to do: all rows were cached"
    failed = [asdict(failure) for failure in status.failed]
    finish(
        f"cache of {job.target.name} on {job.corpus.name}",
        {
            "rows": f"{status.cached} cached, {status.skipped} skipped" + (f", {status.failed_rows} failed" if failed else ""),
            "skipped": ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "none",
            "tokens": f"{status.tokens}, {supervised / tokens:.1%} of them supervised",
            "bytes a token": f"{status.bytes / tokens:.0f} ({status.bytes / tokens / published:.2f} of published), codec {job.cache.codec}",
            "speed": rate,
            "manifest": manifest.hash,
            "stored": cache.settings.root,
            **({"failed": "; ".join(f"rows {f.start}-{f.stop - 1}: {f.reason}" for f in status.failed)} if failed else {}),
        },
        {
            "target": describe(target),
            "manifest": manifest.hash,
            "rows": status.rows,
            "cached": status.cached,
            "skipped": dict(skipped),
            "failed": failed,
            "tokens": status.tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens,
            "bytes": status.bytes,
            "bytes_per_token": status.bytes / tokens,
            "of_published_layout": status.bytes / tokens / published,
            "seconds": seconds,
            "producers": reports,
        },
        job.result_path("cache"),
    )
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    launch(main, {f"--{mode}": f"mode={mode}" for mode in ("stat", "verify", "gc")})
