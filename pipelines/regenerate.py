"""Let the target answer the training prompts: `python -m pipelines.regenerate target=qwen3_8b`.

Resumes by content hash: run it again after a crash, or after adding prompts, and only what is missing is answered.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import hydra
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from actors.answers import AnswerStore, Part, answers_hash
from actors.cluster import cluster
from actors.engines.base import EngineSettings
from actors.engines.vllm import AnswerSettings
from actors.generator import GeneratorSettings, regenerate
from corpus.answers import summarize, usable
from corpus.show import show_rows
from pipelines.job import Job, JobError, finish, launch, mendable, notices, output, progress
from pipelines.machine import engine_count
from pipelines.prepare import read_conversations
from pipelines.target import Target, describe


class GeneratorConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    actors: int | None = Field(ge=1)
    threads: int = Field(ge=1)
    gpus: float | None = Field(ge=0)
    dtype: Literal["bfloat16", "float32"]
    max_length: int = Field(ge=2)
    batch_tokens: int = Field(ge=1)
    batch_rows: int = Field(ge=1)
    batch_conversations: int = Field(ge=1)
    part_rows: int = Field(ge=1)
    kv_cache_gib: int = Field(ge=1)
    tensor_parallel: int = Field(ge=1)
    seed: int


class RegenerateJob(Job):
    generator: GeneratorConfig
    show: int = Field(0, ge=0)


@hydra.main(config_path="../conf", config_name="regenerate", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = RegenerateJob.from_config(cfg)
    store = job.open_store()
    conversations = read_conversations(store.child(job.places.prompts), "train")
    if not conversations:
        raise JobError(f"corpus {job.corpus.name} has no training prompts. Run `python -m pipelines.prepare` with other sources.")
    target = job.target.resolve(notices.print)
    answers = AnswerStore(store.child(job.places.answers))
    engine, sampling, settings = engine_settings(job, target)
    answers.claim(
        {
            "target": target.identity.weights_fingerprint,
            "tokenizer": target.identity.tokenizer_hash,
            "chat_template": target.identity.chat_template_hash,
            "sampling": job.target.sampling.model_dump(),
            "enable_thinking": job.target.enable_thinking,
            "max_length": job.generator.max_length,
            "seed": job.generator.seed,
        }
    )
    started, before = time.perf_counter(), sum(part.answer_tokens for part in answers.parts)
    missing = {conversation.id for conversation in conversations} - answers.conversation_ids()
    if missing:
        with cluster(job.cluster), progress() as bar:
            regenerate(conversations, answers, engine, sampling, settings, _watch(bar, len(missing)))
    seconds = time.perf_counter() - started
    generated = sum(part.answer_tokens for part in answers.parts) - before
    rows = list(answers)
    summary = summarize(rows, target.template.stop_ids)
    shown = [row.masked() for row in rows if usable(row, target.template.stop_ids)][: job.show]
    show_rows(shown, target.template.decode, output, job.show, target.template.control_ids)
    finish(
        f"answers of {job.target.name} to {job.corpus.name}",
        {
            "rows": f"{summary.rows}, {summary.usable} usable",
            "left out": ", ".join(f"{count} {reason}" for reason, count in summary.unusable.most_common()) or "none",
            "supervised": f"{summary.supervised_share:.1%} of the tokens",
            "answered now": f"{len(missing)} conversations, {generated} tokens in {seconds:.0f} s"
            if missing
            else "nothing: all were answered",
            "speed": f"{generated / seconds:.0f} tokens/s, engine start included" if missing else "-",
            "stored": answers.store.settings.root,
        },
        {
            "target": describe(target),
            "answers_hash": answers_hash(answers),
            "summary": summary.to_json(),
            "answered_now": len(missing),
            "generated_tokens": generated,
            "seconds": seconds,
        },
        job.result_path("regenerate"),
    )


def engine_settings(job: RegenerateJob, target: Target) -> tuple[EngineSettings, AnswerSettings, GeneratorSettings]:
    """The typed settings of the actors, from the job's config."""
    generator = job.generator
    actors, gpus = engine_count(generator.actors, generator.gpus, generator.threads)
    engine = EngineSettings(
        model=str(target.folder),
        layer_ids=target.layer_ids,
        dtype=generator.dtype,
        max_length=generator.max_length,
        batch_tokens=generator.batch_tokens,
        batch_rows=generator.batch_rows,
        threads=generator.threads,
        tensor_parallel=generator.tensor_parallel,
        kv_cache_gib=generator.kv_cache_gib,
    )
    sampling = AnswerSettings(**job.target.sampling.model_dump(), stop_token_ids=target.template.stop_ids, seed=generator.seed)
    settings = GeneratorSettings(
        actors=actors,
        cpus=generator.threads,
        gpus=gpus,
        batch_conversations=generator.batch_conversations,
        part_rows=generator.part_rows,
        enable_thinking=job.target.enable_thinking,
    )
    return engine, sampling, settings


def _watch(bar: object, total: int) -> Callable[[Part], None]:
    from rich.progress import Progress

    assert isinstance(bar, Progress)
    task = bar.add_task("answering", total=total, note="starting the engines")
    started, tokens, reasons = time.perf_counter(), 0, Counter[str]()

    def on_part(part: Part) -> None:
        nonlocal tokens
        tokens += part.answer_tokens
        reasons.update(part.reasons)
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        bar.update(task, advance=len(part.conversation_ids), note=f"{tokens / (time.perf_counter() - started):.0f} tokens/s; {told}")

    return on_part


if __name__ == "__main__":
    launch(main)
