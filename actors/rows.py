"""From a cache's rows to samples: answers that are stored already, or prompts that are answered while they are cached."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from actors.answers import AnswerStore
from actors.dialogue import Dialogue
from actors.engines.base import Captured, EngineSettings, HiddenStateEngine
from actors.errors import ActorError
from actors.ledger import Lease
from actors.prompts import PromptStore
from corpus.answers import FAILED, STOP, AnsweredRow, training_rows, unusable
from corpus.masked import MaskedRow
from corpus.template import ChatTemplate
from storage.commits import Skipped
from storage.contract import Contract
from storage.object_store import ObjectStore
from storage.sample import Sample, supervised_rows

JOINED = "part of a later turn's row"
_SOURCE_KEY = "source.json"


@dataclass(frozen=True)
class ProducerSettings:
    """`producers` engines; `pending_bytes` bounds what one holds between engine and storage: queued, encoded or in upload."""

    producers: int = 1
    cpus: int = 1
    gpus: float = 0
    shard_bytes: int = 256 << 20
    pending_bytes: int = 512 << 20


@dataclass(frozen=True)
class OnePass:
    """The target answers the prompts while they are cached, instead of reading answers that `regenerate` stored."""

    enable_thinking: bool = False


@dataclass(frozen=True)
class CacheRecipe:
    """Everything a producer needs to know: where rows come from, where samples go, and what they must be like."""

    cache: ObjectStore
    answers: ObjectStore
    contract: Contract
    engine: EngineSettings
    mask_token_id: int
    stop_ids: tuple[int, ...]
    settings: ProducerSettings
    keep_truncated: bool = False
    one_pass: OnePass | None = None


def claim_source(recipe: CacheRecipe) -> None:
    """Bind a cache to where its rows come from and how answers are sampled; ActorError where it is bound otherwise."""
    source: dict[str, object] = {"rows": "stored answers"}
    if recipe.one_pass and recipe.engine.answers:
        source = {"rows": "answers given while caching", **asdict(recipe.one_pass), **asdict(recipe.engine.answers)}
    ours = json.loads(json.dumps(source))
    try:
        theirs = json.loads(recipe.cache.get(_SOURCE_KEY))
    except FileNotFoundError:
        # Before there was this file, every cache was of stored answers.
        theirs = {"rows": "stored answers"} if recipe.cache.list("commits/") else ours
        recipe.cache.put(_SOURCE_KEY, json.dumps(theirs, indent=2).encode())
    except ValueError as error:
        raise ActorError(f"{recipe.cache.url(_SOURCE_KEY)} is damaged ({error}); remove the cache's folder, or copy it again") from error
    if differing := [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]:
        told = "; ".join(f"{key}: there {theirs.get(key)!r}, asked {ours.get(key)!r}" for key in differing)
        raise ActorError(
            f"{recipe.cache.settings.root} holds rows of another source ({told}). They are never mixed: ask for the same, or give this "
            "corpus another name (`corpus.name=...`)."
        )


class AnsweredRows:
    """Samples of answers that are stored already: one prefill for each row of `cached_rows`."""

    def __init__(self, recipe: CacheRecipe, engine: HiddenStateEngine) -> None:
        self.recipe, self.engine = recipe, engine
        self.answers = AnswerStore(recipe.answers)

    def samples(self, lease: Lease, skipped: list[Skipped]) -> Iterator[tuple[int, Sample]]:
        """(row index, sample) as the engine gives them; what is left out is added to `skipped`."""
        ready, left_out = cached_rows(self.answers.read_around(lease.start, lease.stop), self.recipe)
        skipped += [row for row in left_out if lease.start <= row.index < lease.stop]
        leased = [(index, row) for index, row in ready if lease.start <= index < lease.stop]
        for batch in batches(leased, self.recipe.engine.batch_tokens, self.recipe.engine.batch_rows):
            captured = self.engine.prefill([row.input_ids.tolist() for _, row in batch])
            for (index, row), states in zip(batch, captured, strict=True):
                yield index, make_sample(row, states, self.recipe.contract)


class OnePassRows:
    """Samples of conversations that are answered now: each answer and its states come from the same request.

    A conversation is one row of the cache: its last usable answer with all that was said before. Earlier answers in it are supervised
    as well where the prompt repeats them token by token; a template that drops earlier thinking does not.
    """

    def __init__(self, recipe: CacheRecipe, one_pass: OnePass, engine: HiddenStateEngine) -> None:
        self.recipe, self.one_pass, self.engine = recipe, one_pass, engine
        self.prompts = PromptStore(recipe.cache)
        self.template = ChatTemplate(Path(recipe.engine.model))

    def samples(self, lease: Lease, skipped: list[Skipped]) -> Iterator[tuple[int, Sample]]:
        """(row index, sample) as the engine gives them; what is left out is added to `skipped`."""
        asked = [(index, Dialogue(c)) for index, c in enumerate(self.prompts.read(lease.start, lease.stop), lease.start)]
        usable: dict[int, tuple[AnsweredRow, Captured]] = {}  # the last usable answer of each conversation that goes on
        while asked:
            running: list[tuple[int, Dialogue]] = []
            for index, dialogue in asked:
                if problem := dialogue.next_prompt(self.template, self.one_pass.enable_thinking, self.recipe.engine.max_length):
                    dialogue.answered([], FAILED, problem)
                    yield from self._sample(index, dialogue, usable, skipped)
                else:
                    running.append((index, dialogue))
            asked = []
            for place, answer, states in self.engine.answer([dialogue.prompt for _, dialogue in running]):
                index, dialogue = running[place]
                dialogue.answered(answer.token_ids, answer.finish_reason, answer.error)
                if not skip_reason(dialogue.rows[-1], self.recipe):
                    usable[index] = dialogue.rows[-1], states
                if answer.finish_reason == STOP and dialogue.rest:
                    dialogue.go_on(self.template.answer_text(answer.token_ids))
                    asked.append((index, dialogue))
                else:
                    yield from self._sample(index, dialogue, usable, skipped)

    def _sample(
        self, index: int, dialogue: Dialogue, usable: dict[int, tuple[AnsweredRow, Captured]], skipped: list[Skipped]
    ) -> Iterator[tuple[int, Sample]]:
        if index not in usable:
            skipped.append(Skipped(dialogue.rows[-1].row_id, index, skip_reason(dialogue.rows[-1], self.recipe)))
            return
        row, states = usable.pop(index)
        joined = training_rows(turn for turn in dialogue.rows[: row.turn + 1] if not skip_reason(turn, self.recipe))
        yield index, make_sample(joined[-1], states, self.recipe.contract)


def cached_rows(answers: Iterable[tuple[int, AnsweredRow]], recipe: CacheRecipe) -> tuple[list[tuple[int, MaskedRow]], list[Skipped]]:
    """What is cached of numbered answers, and what is not and why.

    Turns whose prompts continue one another are one row, in the place of the last of them; the earlier ones count as skipped.

    Args:
        answers: whole conversations.
    """
    answers = list(answers)
    reasons = {row.row_id: skip_reason(row, recipe) for _, row in answers}
    rows = {row.row_id: row for row in training_rows(row for _, row in answers if not reasons[row.row_id])}
    ready = [(index, rows[row.row_id]) for index, row in answers if row.row_id in rows]
    return ready, [Skipped(row.row_id, index, reasons[row.row_id] or JOINED) for index, row in answers if row.row_id not in rows]


def skip_reason(row: AnsweredRow, recipe: CacheRecipe) -> str:
    """Why a row is not cached; empty if it is."""
    max_length, mask = recipe.contract.capture.max_length, recipe.mask_token_id
    if reason := unusable(row, recipe.stop_ids, keep_truncated=recipe.keep_truncated):
        return reason
    if len(row.prompt_ids) + len(row.answer_ids) > max_length:
        return "longer than max_length"
    # The mask token must mean "unknown" and nothing else.
    if mask in row.prompt_ids or mask in row.answer_ids:
        return "holds the mask token"
    return ""


def batches(rows: Sequence[tuple[int, MaskedRow]], batch_tokens: int, batch_rows: int) -> Iterator[list[tuple[int, MaskedRow]]]:
    """Group rows, longest first, so that a batch holds at most `batch_tokens` tokens (a longer row goes alone) and `batch_rows` rows."""
    batch: list[tuple[int, MaskedRow]] = []
    held = 0
    for index, row in sorted(rows, key=lambda item: (-len(item[1].input_ids), item[0])):
        if batch and (held + len(row.input_ids) > batch_tokens or len(batch) >= batch_rows):
            yield batch
            batch, held = [], 0
        batch.append((index, row))
        held += len(row.input_ids)
    if batch:
        yield batch


def bf16_bits(states: torch.Tensor) -> np.ndarray:
    """The uint16 bits of `states` rounded to bf16."""
    return states.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def make_sample(row: MaskedRow, states: Captured, contract: Contract) -> Sample:
    """One row and its states, as stored: the last hidden state only where the contract keeps it.

    Where the answer was produced in the same request the last token was never read, and its states are zero. No drafter reads them: an
    anchor's context ends before it, and its successor is in the row.
    """
    ids = row.input_ids
    spans = np.asarray(row.spans, dtype=np.int32)
    rows = supervised_rows(spans, len(ids), contract.capture.last_hidden_rows)
    missing = len(ids) - states.last_hidden.shape[0]
    context, last = (F.pad(plane, (0, 0, 0, missing)) if missing else plane for plane in (states.context, states.last_hidden))
    return Sample(
        row_id=row.row_id,
        input_ids=ids,
        spans=spans,
        context=bf16_bits(context),
        last_hidden=bf16_bits(last[torch.from_numpy(rows.astype(np.int64))]),
        last_rows=rows,
    )


def sample_bytes(sample: Sample) -> int:
    """Bytes of a decoded sample in memory."""
    return int(sample.context.nbytes + sample.last_hidden.nbytes + sample.input_ids.nbytes)
