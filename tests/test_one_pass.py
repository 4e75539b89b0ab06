"""Answers given while they are cached: ids, masks and states of the same request, turns, what cannot be asked, resume and growth."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from storage_cases import same, to_bf16
from tiny_models import write_tiny_model
from transformers import AutoModelForCausalLM

from actors.engines.base import AnswerSettings, EngineSettings
from actors.engines.hf import HfEngine
from actors.errors import ActorError
from actors.ledger import Ledger, LedgerSettings
from actors.producer import Producer
from actors.prompts import PromptStore
from actors.rows import CacheRecipe, OnePass, ProducerSettings, claim_source
from corpus.conversation import Conversation, Message
from corpus.template import ChatTemplate
from storage.commits import read_commits
from storage.contract import Capture, Contract, ensure_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.reader import SampleReader
from storage.sample import Sample
from storage.target_files import target_identity

LAYER_IDS, MAX_LENGTH, NEW_TOKENS = (0, 3, 5), 128, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", tied=False)


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> CacheRecipe:
    root, template = ObjectStore(StorageSettings(str(tmp_path))), ChatTemplate(model)
    answers = AnswerSettings(temperature=1.0, max_new_tokens=NEW_TOKENS, stop_token_ids=template.stop_ids, seed=3)
    made = CacheRecipe(
        cache=root.child("cache"),
        answers=root.child("answers"),
        contract=Contract(target_identity(model, "tiny"), Capture(LAYER_IDS, MAX_LENGTH, "lossless")),
        engine=EngineSettings(str(model), LAYER_IDS, engine="hf", dtype="float32", max_length=MAX_LENGTH, answers=answers),
        mask_token_id=template.vocabulary()["<|reserved_0|>"],
        stop_ids=template.stop_ids,
        settings=ProducerSettings(shard_bytes=200_000),
        keep_truncated=True,
        one_pass=OnePass(),
    )
    claim_source(made)
    ensure_contract(made.cache, made.contract)
    return made


def ask(*questions: str) -> Conversation:
    return Conversation(tuple(Message("user", question) for question in questions), "test", "chat")


def work_off(recipe: CacheRecipe, rows: int) -> Ledger:
    ledger = Ledger(recipe.cache, rows, LedgerSettings(lease_rows=4))
    Producer("a", recipe).run(ledger)
    return ledger


def cached(recipe: CacheRecipe) -> dict[str, Sample]:
    manifest = Manifest.from_commits(read_commits(recipe.cache))
    with SampleReader(recipe.cache, recipe.contract, manifest) as reader:
        return {sample.row_id: sample for sample in reader.stream(range(len(manifest)))}


def check(sample: Sample, recipe: CacheRecipe, conversation: Conversation) -> None:
    """The prompt is the template's, every supervised span an answer, and the states are Hugging Face's for exactly these ids."""
    template, ids = ChatTemplate(Path(recipe.engine.model)), sample.input_ids.tolist()
    prompt = template.prompt_ids(list(conversation.rounds()[0]), False, conversation.tools)
    assert ids[: len(prompt)] == prompt
    assert sample.spans[0][0] == len(prompt)
    assert sample.spans[-1][1] == len(ids)
    for start, stop in sample.spans.tolist():
        ends = [token in recipe.stop_ids for token in ids[start:stop]]
        assert not any(ends[:-1])
        assert ends[-1] or stop - start == NEW_TOKENS or len(ids) == MAX_LENGTH
    (states,) = HfEngine(recipe.engine).prefill([ids[:-1]])
    assert np.array_equal(sample.context[:, :-1], to_bf16(states.context.numpy()))
    assert not sample.context[:, -1].any()
    assert np.array_equal(sample.last_hidden, to_bf16(states.last_hidden.numpy()[sample.last_rows]))
    assert sample.last_rows.tolist() == [p - 1 for start, stop in sample.spans.tolist() for p in range(start, stop)]


def test_prompts_become_samples_in_one_pass_and_a_grown_corpus_redoes_nothing(recipe: CacheRecipe) -> None:
    asked = [ask(f"What is {n} plus {n}?") for n in range(9)]
    rows = PromptStore(recipe.cache).add(asked)
    ledger = work_off(recipe, rows)
    assert (ledger.status().done, ledger.status().failed) == (9, ())
    samples, by_id = cached(recipe), {c.id: c for c in asked}
    assert len(samples) >= 7, "few random answers loop or are empty"
    for row_id, sample in samples.items():
        check(sample, recipe, by_id[row_id.partition(".")[0]])
    before = {key: recipe.cache.get(key) for key in recipe.cache.list("commits/")}
    more = [ask(f"Name {n} colours.") for n in range(3)]
    random.Random(0).shuffle(asked)
    rows = PromptStore(recipe.cache).add([*more, *asked])
    assert rows == 12
    assert work_off(recipe, rows).status().done == 12
    assert before.items() < {key: recipe.cache.get(key) for key in recipe.cache.list("commits/")}.items()
    grown = cached(recipe)
    assert all(same(grown[row_id], sample) for row_id, sample in samples.items())
    assert len(grown) > len(samples)


def test_turns_are_answered_one_after_another_into_one_row(recipe: CacheRecipe) -> None:
    asked = [ask(f"What is {n}?", "And twice that?") for n in range(6)]
    work_off(recipe, PromptStore(recipe.cache).add(asked))
    samples, by_id = cached(recipe), {c.id: c for c in asked}
    assert samples
    assert {row_id.partition(".")[0] for row_id in samples} <= set(by_id)
    for row_id, sample in samples.items():
        if row_id.endswith(".0"):
            check(sample, recipe, by_id[row_id[:-2]])
        else:
            ids = sample.input_ids.tolist()
            assert ids[sample.spans[-1][0] :][-1] in recipe.stop_ids or len(ids) - sample.spans[-1][0] == NEW_TOKENS
    assert any(row_id.endswith(".1") for row_id in samples), "some first answers end by themselves"


def test_prompts_without_room_are_skipped_and_the_rest_goes_on(recipe: CacheRecipe) -> None:
    rows = PromptStore(recipe.cache).add([ask("word " * 200), ask("What is 1?"), ask("What is 2?")])
    ledger = work_off(recipe, rows)
    assert (ledger.status().done, ledger.status().failed) == (3, ())
    reasons = [row.reason for commit in read_commits(recipe.cache) for row in commit.skipped]
    assert "failed" in reasons


def test_an_answer_is_the_same_at_every_attempt(recipe: CacheRecipe) -> None:
    engine = HfEngine(recipe.engine)
    prompts = [[10, 20, 30 + n] for n in range(3)]
    first = {index: answer for index, answer, _ in engine.answer(prompts)}
    again = {index: answer for index, answer, _ in engine.answer(prompts[::-1])}
    assert [first[n] for n in range(3)] == [again[2 - n] for n in range(3)]
    assert len({tuple(answer.token_ids) for answer in first.values()}) > 1


def test_another_source_or_sampling_is_refused(recipe: CacheRecipe) -> None:
    claim_source(recipe)
    with pytest.raises(ActorError, match=r"rows: there 'answers given while caching', asked 'stored answers'"):
        claim_source(replace(recipe, one_pass=None, engine=replace(recipe.engine, answers=None)))
    hotter = replace(recipe.engine, answers=replace(recipe.engine.answers, temperature=0.5))
    with pytest.raises(ActorError, match=r"temperature: there 1.0, asked 0.5"):
        claim_source(replace(recipe, engine=hotter))


def test_a_lost_or_foreign_prompt_part_is_named(recipe: CacheRecipe) -> None:
    PromptStore(recipe.cache).add([ask("a"), ask("b")])
    PromptStore(recipe.cache).add([ask("c")])
    first, second = recipe.cache.list("prompts/")
    recipe.cache.delete(first)
    with pytest.raises(ActorError, match=second):
        PromptStore(recipe.cache)


def test_hf_answers_are_the_models_own_at_temperature_zero(model: Path, recipe: CacheRecipe) -> None:
    """Against a naive loop over full forward passes."""
    greedy = replace(recipe.engine, answers=replace(recipe.engine.answers, temperature=0.0))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = [[20, 30, 40, 50 + n] for n in range(2)]
    for index, answer, captured in HfEngine(greedy).answer(prompts):
        ids = list(prompts[index])
        while len(ids) < len(prompts[index]) + NEW_TOKENS and (len(ids) == 4 or ids[-1] not in recipe.stop_ids):
            with torch.inference_mode():
                ids.append(int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer.token_ids == ids[4:]
        assert captured.context.shape == (3, len(ids) - 1, 128)
        assert captured.last_hidden.shape == (len(ids) - 1, 128)
