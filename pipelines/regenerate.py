"""Let the target answer the training prompts: `python -m pipelines.regenerate target=qwen3_8b`.

Resumes by content hash: run it again after a crash, or after adding prompts, and only what is missing is answered. Rows that `prepare`
was told to keep the answers of (`corpus.answers=keep`) are stored with these, masked, and cost no engine anything.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import urlsplit

import hydra
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field, field_validator
from rich.progress import Progress

from actors.answer_pool import GeneratorSettings, MakeAnswerer, endpoint_answerers, regenerate, vllm_answerers
from actors.answers import AnswerStore, Part, answers_hash
from actors.brought_answers import BROUGHT, SETTING, BroughtSettings, store_brought_answers
from actors.cluster import cluster
from actors.engines.base import AnswerSettings, EngineSettings
from actors.engines.endpoint import EndpointSettings
from corpus.answers import training_rows, usable
from corpus.card import AnswerSummary, card_markdown, summarize
from corpus.conversation import Conversation
from corpus.show import show_rows
from pipelines.job import Job, JobError, finish, launch, mendable, notices, output, progress, write_text
from pipelines.machine import default_batch_rows, engine_count, git_revision
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
    batch_rows: int | None = Field(ge=1)
    batch_conversations: int = Field(ge=1)
    part_rows: int = Field(ge=1)
    kv_cache_gib: int = Field(ge=1)
    tensor_parallel: int = Field(ge=1)
    seed: int
    endpoints: tuple[str, ...]
    endpoint_model: str | None
    retries: int = Field(ge=0)
    timeout_seconds: float = Field(gt=0)

    @field_validator("endpoints")
    @classmethod
    def _plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no URL; give the API's base, as in http://host:8000/v1")
            if "@" in parts.netloc or parts.query:
                raise ValueError("a URL that holds a key or password would end up in results; keys come from OPENAI_API_KEY alone")
        return urls


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
    if job.corpus.answers == "drop" and any(conversation.brings_answers for conversation in conversations):
        raise JobError(
            f"corpus {job.corpus.name} was prepared with corpus.answers=keep: say so here too, or run `python -m pipelines.prepare` again "
            "to let the target answer its rows."
        )
    target = job.target.resolve(notices.print)
    answers = AnswerStore(store.child(job.places.answers))
    answers.claim(provenance(job, target))
    started, before = time.perf_counter(), len(answers.parts)
    known = answers.conversation_ids()
    missing = {conversation.id: conversation for conversation in conversations if conversation.id not in known}
    given_up = complete(job, target, answers, list(missing.values())) if missing else {}
    report(job, target, answers, conversations, before, given_up, time.perf_counter() - started)


def complete(job: RegenerateJob, target: Target, answers: AnswerStore, missing: Sequence[Conversation]) -> dict[str, str]:
    """Store the answers that rows bring along, and let the target give the others; returns the conversations that were given up."""
    asked = [conversation for conversation in missing if not conversation.brings_answers]
    settings = GeneratorSettings(job.generator.batch_conversations, job.generator.part_rows, job.target.enable_thinking)
    with cluster(job.cluster) if asked and not job.generator.endpoints else nullcontext(), progress() as bar:
        on_part = _watch(bar, len(missing))
        brought = BroughtSettings(job.corpus.unstable_template, job.target.enable_thinking, job.generator.max_length)
        rest = (conversation for conversation in missing if conversation.brings_answers)
        store_brought_answers(rest, answers, target.template, brought, on_part)
        return regenerate(asked, answers, answerers(job, target, settings, answers), settings, on_part) if asked else {}


def provenance(job: RegenerateJob, target: Target) -> dict[str, Any]:
    """Everything that decides an answer; answers that differ in any of it are never in one folder."""
    return {
        "target": target.identity.weights_fingerprint,
        "tokenizer": target.identity.tokenizer_hash,
        "chat_template": target.identity.chat_template_hash,
        "sampling": job.target.sampling.model_dump(),
        "stop_token_ids": list(target.template.stop_ids),
        "enable_thinking": job.target.enable_thinking,
        "max_length": job.generator.max_length,
        "seed": job.generator.seed,
        **({SETTING: {"unstable_template": job.corpus.unstable_template}} if job.corpus.answers == "keep" else {}),
    }


def answerers(job: RegenerateJob, target: Target, settings: GeneratorSettings, answers: AnswerStore) -> list[MakeAnswerer]:
    """vLLM engines under Ray, or the servers that the config names."""
    generator = job.generator
    actors, gpus = engine_count(job.cluster, generator.actors, generator.gpus, generator.threads, generator.tensor_parallel)
    batch_rows = generator.batch_rows or default_batch_rows(gpus)
    sampling = AnswerSettings(**job.target.sampling.model_dump(), stop_token_ids=target.template.stop_ids, seed=generator.seed)
    if generator.endpoints:
        endpoints = [
            EndpointSettings(url, generator.max_length, generator.endpoint_model, batch_rows, generator.retries, generator.timeout_seconds)
            for url in generator.endpoints
        ]
        return endpoint_answerers(endpoints, target.template, sampling, settings, answers)
    engine = EngineSettings(
        model=str(target.folder),
        layer_ids=target.layer_ids,
        dtype=generator.dtype,
        max_length=generator.max_length,
        batch_tokens=generator.batch_tokens,
        batch_rows=batch_rows,
        threads=generator.threads,
        tensor_parallel=generator.tensor_parallel,
        kv_cache_gib=generator.kv_cache_gib,
    )
    return vllm_answerers(actors, generator.threads, gpus, engine, sampling, settings, answers)


def report(
    job: RegenerateJob,
    target: Target,
    answers: AnswerStore,
    conversations: Sequence[Conversation],
    before: int,
    given_up: dict[str, str],
    seconds: float,
) -> None:
    """Write the data set card beside the answers and into the output folder, and say what is in them; exit with 1 if rows were given up.

    Args:
        before: how many parts there were before this run.
        given_up: conversations that engines failed on, with the reason.
        seconds: of this run.
    """
    rows = list(answers)
    summary = summarize(rows, target.template.stop_ids)
    card = make_card(job, target, answers, conversations, summary)
    text = card_markdown(card)
    answers.store.put("card.json", json.dumps(card, indent=2).encode())
    answers.store.put("card.md", text.encode())
    card_path = job.result_path("answers_card").with_suffix(".md")
    write_text(card_path, text)
    shown = training_rows(row for row in rows if usable(row, target.template.stop_ids)) if job.show else []
    show_rows(shown, target.template.decode, output, job.show, target.template.control_ids)
    now = [part for part in answers.parts[before:] if part.engine != BROUGHT]
    answered, generated = sum(len(part.conversation_ids) for part in now), sum(part.answer_tokens for part in now)
    brought = sum(len(part.conversation_ids) for part in answers.parts[before:]) - answered
    total, strays = summary.total, card["corpus"]["answered_but_not_in_corpus"]
    reasons = "; ".join(f"{count} {reason}" for reason, count in Counter(given_up.values()).most_common(3))
    finish(
        f"answers of {job.target.name} to {job.corpus.name}",
        {
            "rows": f"{total.rows}, {total.usable} usable",
            "left out": ", ".join(f"{count} {reason}" for reason, count in summary.unusable.most_common()) or "none",
            "supervised": f"{total.supervised_share:.1%} of the tokens of usable rows",
            "answered now": f"{answered} conversations, {generated} tokens in {seconds:.0f} s" if now else "nothing: all were answered",
            **({"stored now": f"{brought} conversations with the answers that they bring along"} if brought else {}),
            "speed": f"{generated / seconds:.0f} tokens/s, engine start included" if now else "-",
            **({"not in corpus": f"{strays} answered conversations that it no longer holds; `cache` uses them"} if strays else {}),
            **({"given up": f"{len(given_up)} conversations, for the next run to try again: {reasons}"} if given_up else {}),
            "stored": answers.store.settings.root,
            "card": str(card_path),
        },
        {
            "target": describe(target),
            "answers_hash": answers_hash(answers),
            "summary": summary.to_json(),
            "card": card,
            "answered_now": answered,
            "brought_now": brought,
            "generated_tokens": generated,
            "seconds": seconds,
            "given_up": given_up,
        },
        job.result_path("regenerate"),
    )
    if given_up:
        sys.exit(1)


def make_card(
    job: RegenerateJob, target: Target, answers: AnswerStore, conversations: Sequence[Conversation], summary: AnswerSummary
) -> dict[str, Any]:
    """The data set card: what is in the answers, of what, by whom and how; see `corpus.card.card_markdown`."""
    asked, answered = {conversation.id for conversation in conversations}, answers.conversation_ids()
    given = [part for part in answers.parts if part.engine != BROUGHT]
    tokens, seconds = sum(part.answer_tokens for part in given), sum(part.seconds for part in given)
    engines: Counter[str] = Counter()
    for part in answers.parts:
        engines[part.engine] += part.rows
    return {
        "name": f"Answers of {job.target.model} to {job.corpus.name}",
        "rows": summary.to_json(),
        "corpus": {
            "name": job.corpus.name,
            "sources": ", ".join(source.name for source in job.corpus.train),
            "conversations": len(asked),
            "answered": len(asked & answered),
            "not_answered": len(asked - answered),
            "answered_but_not_in_corpus": len(answered - asked),
        },
        "sampling": {
            **answers.settings["sampling"],
            **{name: answers.settings[name] for name in ("stop_token_ids", "enable_thinking", "max_length", "seed")},
        },
        "target": {"name": job.target.name, **asdict(target.identity)},
        "answers_given_by": {name: f"{count} rows" for name, count in engines.most_common()},
        "speed": {
            "answer_tokens": tokens,
            "seconds": seconds,
            "answer_tokens_per_second": tokens / seconds if seconds else None,
            "what": "all runs together, engine starts included",
        },
        "made": {
            "answers_hash": answers_hash(answers),
            "git_revision": git_revision(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    }


def _watch(bar: Progress, total: int) -> Callable[[Part], None]:
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
