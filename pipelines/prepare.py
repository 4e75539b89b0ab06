"""Turn prompts into normalized conversations with a held-out part: `python -m pipelines.prepare corpus=bundled`."""

import json
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig
from pydantic import Field
from rich.progress import Progress

from corpus.benchmarks import WORDING, load_benchmarks
from corpus.contamination import BenchmarkIndex
from corpus.conversation import Conversation
from corpus.errors import RowRejected
from corpus.lengths import token_lengths
from corpus.masks import Masker
from corpus.rows import parse_row
from corpus.selection import drop_duplicates, mix, split_heldout
from corpus.show import show_prompt, show_rows
from corpus.sources import Source, SourceSpec, read_source
from corpus.template import ChatTemplate
from pipelines.job import Job, JobError, finish, launch, mendable, notices, output, progress
from pipelines.prepared import Prepared, print_tables, screen
from storage.object_store import ObjectStore


class PrepareJob(Job):
    show: int = Field(0, ge=0)


@hydra.main(config_path="../conf", config_name="prepare", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = PrepareJob.from_config(cfg)
    store = job.open_store().child(job.places.prompts)
    template = job.target.load_template(notices.print)
    with progress() as bar:
        prepared = prepare(job, template, bar)
    store.put("train.jsonl", _lines(prepared.train))
    store.put("heldout.jsonl", _lines(prepared.heldout))
    _show(job, prepared.train[: job.show], template)
    summary = prepared.summary()
    print_tables(summary, output)
    finish(f"prompts of {job.corpus.name}", {**screen(summary), "stored": store.settings.root}, summary, job.result_path("prepare"))


def prepare(job: Job, template: ChatTemplate, bar: Progress) -> Prepared:
    """Read the sources, leave out what must not be trained on, and set the held-out part aside.

    In this order: unusable rows, duplicates, rows that are too long, that repeat a benchmark question, whose mask is refused; what the
    weights do not draw; the held-out part. Held-out rows are only measured on, so theirs go through the first two steps alone.
    """
    corpus = job.corpus
    sources = [_read(spec, corpus.answers == "keep", bar) for spec in corpus.train]
    drop_duplicates(sources)
    heldout_sources = [_read(spec, False, bar) for spec in corpus.heldout]
    drop_duplicates(heldout_sources)
    heldout = [row for source in heldout_sources for row in source.rows]
    if heldout:
        _sift(sources, _not_held_out(heldout))

    everything = [row for source in sources for row in source.rows] + heldout
    counting = bar.add_task("counting tokens", total=len(everything), note=f"by the tokenizer of {job.target.name}")
    lengths = token_lengths(everything, template, lambda rows: bar.update(counting, completed=rows))
    if corpus.max_tokens is not None:
        _sift(sources, _short_enough(lengths, corpus.max_tokens))

    benchmarks = load_benchmarks(corpus.benchmarks) if corpus.benchmarks else []
    index = BenchmarkIndex([row for rows in benchmarks for row in rows.conversations], WORDING)
    if benchmarks:
        _sift(sources, index.judge, bar, "comparing with benchmarks")

    masks = None
    if corpus.answers == "keep":
        masker = Masker(template, corpus.unstable_template, job.target.enable_thinking)
        _sift(sources, _maskable(masker), bar, "masking answers")
        masks = masker.report

    mix(sources)
    train = [row for source in sources for row in source.rows]
    if not heldout_sources:
        train, heldout = split_heldout(train, corpus.heldout_share)
    train, heldout = _first(train, corpus.max_train), _first(heldout, corpus.max_heldout)
    if not train:
        raise JobError(f"corpus {corpus.name} has no training prompt left. Lower corpus.heldout_share, or add prompts.")
    return Prepared(
        train=train,
        heldout=heldout,
        sources=[*sources, *heldout_sources],
        benchmarks=benchmarks,
        overlaps=index.found,
        lengths=lengths,
        tokenizer=job.target.name,
        max_tokens=corpus.max_tokens,
        masks=masks,
    )


def read_conversations(store: ObjectStore, part: str) -> list[Conversation]:
    """What `prepare` stored: `train` or `heldout`."""
    try:
        # As bytes: text would also be split at characters that JSON leaves as they are, such as U+2028.
        lines = store.get(f"{part}.jsonl").splitlines()
    except FileNotFoundError:
        raise JobError(
            f"{store.settings.root} holds no prompts yet. Run `python -m pipelines.prepare` with the same corpus first."
        ) from None
    return [parse_row(json.loads(line), "", "") for line in lines]


def _read(spec: SourceSpec, keep_answers: bool, bar: Progress) -> Source:
    task = bar.add_task("reading", total=None, note=spec.name)
    source = read_source(spec, keep_answers, lambda rows: bar.update(task, completed=rows))
    bar.update(task, total=source.read, completed=source.read)
    return source


def _sift(sources: Sequence[Source], judge: Callable[[Conversation], None], bar: Progress | None = None, what: str = "") -> None:
    """Let `judge` decide over every row, with a progress bar for a judge that takes its time."""
    task = bar.add_task(what, total=sum(source.kept for source in sources), note="") if bar else None

    def watched(row: Conversation) -> None:
        if bar is not None and task is not None:
            bar.advance(task)
        judge(row)

    for source in sources:
        source.sift(watched)


def _not_held_out(heldout: Sequence[Conversation]) -> Callable[[Conversation], None]:
    """A prompt that is to be evaluated is never trained on."""
    asked = {conversation.split_key for conversation in heldout}

    def judge(row: Conversation) -> None:
        if row.split_key in asked:
            raise RowRejected("also_held_out", "the held-out prompts begin with the same question")

    return judge


def _short_enough(lengths: dict[str, int], limit: int) -> Callable[[Conversation], None]:
    def judge(row: Conversation) -> None:
        if lengths[row.id] > limit:
            raise RowRejected("too_long", f"{lengths[row.id]} tokens, the limit is {limit}")

    return judge


def _maskable(masker: Masker) -> Callable[[Conversation], None]:
    def judge(row: Conversation) -> None:
        if row.brings_answers:
            masker.mask(row)

    return judge


def _first(conversations: list[Conversation], limit: int | None) -> list[Conversation]:
    """The `limit` smallest content hashes: the same ones whatever the order of the input."""
    return sorted(conversations, key=lambda conversation: conversation.id)[:limit]


def _show(job: PrepareJob, conversations: Sequence[Conversation], template: ChatTemplate) -> None:
    masker = Masker(template, job.corpus.unstable_template, job.target.enable_thinking)
    masked = [masker.mask(row) for row in conversations if row.brings_answers]
    show_rows(masked, template.decode, output, len(masked), template.control_ids)
    for conversation in conversations:
        if not conversation.brings_answers:
            show_prompt(conversation, template, output, job.target.enable_thinking)


def _lines(conversations: Sequence[Conversation]) -> bytes:
    return "".join(json.dumps(conversation.to_row(), ensure_ascii=False) + "\n" for conversation in conversations).encode()


if __name__ == "__main__":
    launch(main)
