"""Turn prompts into normalized conversations with a held-out part: `python -m pipelines.prepare corpus=bundled`."""

import json
from collections import Counter
from collections.abc import Sequence

import hydra
from omegaconf import DictConfig
from pydantic import Field

from corpus.conversation import Conversation
from corpus.rows import parse_row
from corpus.sources import SourceReport, SourceSpec, load_sources, split_heldout
from pipelines.job import Job, JobError, finish, launch, mendable, output
from storage.object_store import ObjectStore


class PrepareJob(Job):
    show: int = Field(0, ge=0)


@hydra.main(config_path="../conf", config_name="prepare", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = PrepareJob.from_config(cfg)
    train, heldout, reports = prepare(job)
    store = job.open_store().child(job.places.prompts)
    store.put("train.jsonl", _lines(train))
    store.put("heldout.jsonl", _lines(heldout))
    for conversation in train[: job.show]:
        output.print(conversation.messages[-1].content, markup=False)
        output.rule()
    dropped = sum((report.dropped for report in reports), Counter())
    finish(
        f"prompts of {job.corpus.name}",
        {
            "read": str(sum(report.read for report in reports)),
            "training": _by_domain(train),
            "held out": _by_domain(heldout),
            "dropped": ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none",
            "stored": store.settings.root,
        },
        {
            "train": len(train),
            "heldout": len(heldout),
            "dropped": dict(dropped),
            "sources": [report.to_json() for report in reports],
        },
        job.result_path("prepare"),
    )


def prepare(job: Job) -> tuple[list[Conversation], list[Conversation], list[SourceReport]]:
    """Read the sources; held-out rows come from a file of their own or are set apart by hash."""
    corpus = job.corpus
    train, reports = load_sources([SourceSpec(corpus.train)])
    if corpus.heldout:
        heldout, more = load_sources([SourceSpec(corpus.heldout)])
        reports = reports + more
        # A prompt that is to be evaluated is never trained on.
        held = {conversation.split_key for conversation in heldout}
        kept = [conversation for conversation in train if conversation.split_key not in held]
        reports[0].dropped["also held out"] += len(train) - len(kept)
        train = kept
    else:
        train, heldout = split_heldout(train, corpus.heldout_share)
    train, heldout = _first(train, corpus.max_train), _first(heldout, corpus.max_heldout)
    if not train:
        raise JobError(f"corpus {corpus.name} has no training prompt left. Lower corpus.heldout_share, or add prompts.")
    return train, heldout, reports


def read_conversations(store: ObjectStore, part: str) -> list[Conversation]:
    """What `prepare` stored: `train` or `heldout`."""
    try:
        lines = store.get(f"{part}.jsonl").decode().splitlines()
    except FileNotFoundError:
        raise JobError(
            f"{store.settings.root} holds no prompts yet. Run `python -m pipelines.prepare` with the same corpus first."
        ) from None
    return [parse_row(json.loads(line), "", "") for line in lines]


def _first(conversations: list[Conversation], limit: int | None) -> list[Conversation]:
    """The `limit` smallest content hashes: the same ones whatever the order of the input."""
    return sorted(conversations, key=lambda conversation: conversation.id)[:limit]


def _lines(conversations: Sequence[Conversation]) -> bytes:
    return "".join(json.dumps(conversation.to_row(), ensure_ascii=False) + "\n" for conversation in conversations).encode()


def _by_domain(conversations: Sequence[Conversation]) -> str:
    counts = Counter(conversation.domain for conversation in conversations)
    return f"{len(conversations)} ({', '.join(f'{count} {domain}' for domain, count in sorted(counts.items()))})" if counts else "none"


if __name__ == "__main__":
    launch(main)
