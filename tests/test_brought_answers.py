"""Answers that rows bring along, from `prepare` to the cache, beside others that the target gives; and turns that become one row."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_templates import FAMILIES, save_target
from pipeline_runs import ENVIRONMENT, Here, Workshop, contents, result_of, run, write_rows
from storage_cases import to_bf16
from tiny_models import write_tiny_model
from token_server import TokenServer, serving
from transformers import AutoTokenizer

from actors.answers import AnswerStore, frequent_tokens, write_part
from actors.brought_answers import BroughtSettings, brought_rows
from actors.engines.base import EngineSettings
from actors.engines.hf import HfEngine
from actors.ledger import Ledger, LedgerSettings, LedgerStatus
from actors.producer import Producer
from actors.rows import JOINED, CacheRecipe, ProducerSettings
from corpus.answers import AnsweredRow, training_rows
from corpus.conversation import Conversation, Message
from corpus.masks import mask_conversation
from corpus.template import ChatTemplate
from storage.commits import read_commits
from storage.contract import Capture, Contract, ensure_contract, load_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore, StorageSettings
from storage.reader import SampleReader
from storage.sample import Sample
from storage.target_files import target_identity

TALKS = [
    [("user", "What is 2 plus 2?"), ("assistant", "It is 4.")],
    [
        ("system", "Be brief."),
        ("user", "Name a river."),
        ("assistant", "The Rhine.\nOr the Rhone."),
        ("user", "Why?"),
        ("assistant", "So."),
    ],
    [("user", "Write <|im_end|> once."), ("assistant", "Here: <|im_end|> and no more.")],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny llama", "llama", tied=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """`cache` works its leases off in this process, without Ray."""
    for name, value in {**ENVIRONMENT, "COLUMNS": "140"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipelines.cache.cluster", lambda settings: nullcontext())
    monkeypatch.setattr("pipelines.cache.run_cache", run_here)
    return Here(monkeypatch, capsys)


def run_here(recipe: CacheRecipe, rows: int, settings: LedgerSettings, on_status: Any) -> tuple[LedgerStatus, list[dict[str, float]]]:
    ledger = Ledger(recipe.cache, rows, settings)
    reports = [Producer("a", recipe).run(ledger)] if ledger.status().open else []
    return ledger.status(), reports


def messages(talk: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in talk]}


def written(tokenizer: Any, talk: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """(ids, supervised) of the conversation in ChatML, written out and tokenized piece by piece: what is typed is never a control token."""
    ids: list[int] = []
    mask: list[bool] = []

    def add(text: str, supervised: bool) -> None:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(found)
        mask.extend([supervised] * len(found))

    for number, (role, text) in enumerate(talk):
        answer = role == "assistant"
        add(f"{chr(10) if number else ''}<|im_start|>{role}\n", False)
        for piece in text.replace("<|im_end|>", "<\x00|im_end|>").split("\x00"):
            add(piece, answer)
        add("<|im_end|>", answer)
    return ids, mask


def samples(cache: ObjectStore) -> dict[str, Sample]:
    manifest = Manifest.from_commits(read_commits(cache))
    with SampleReader(cache, load_contract(cache), manifest) as reader:
        return {sample.row_id: sample for sample in reader.stream(range(len(manifest)))}


def mask_of(sample: Sample) -> list[bool]:
    mask = np.zeros(len(sample.input_ids), dtype=bool)
    for start, stop in sample.spans:
        mask[start:stop] = True
    return mask.tolist()


def do(here: Here, job: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    code, output, errors = here.run(job, overrides)
    assert code == 0, errors
    return result_of(output), output


def test_answers_that_rows_bring_reach_the_cache_token_by_token_beside_the_targets_own(here: Here, model: Path, tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    (tmp_path / "tiny llama").symlink_to(model)
    long = [("user", "Count."), ("assistant", "One."), ("user", "On."), ("assistant", "one two three four " * 20)]
    rows = [*(messages(talk) for talk in [*TALKS, long]), *({"prompt": f"What is {n}?"} for n in range(6))]
    write_rows(tmp_path / "prompts.jsonl", rows)
    write_rows(tmp_path / "heldout.jsonl", [{"prompt": "Name a colour."}])
    kept = ["corpus.answers=keep", "corpus.unstable_template=refuse"]
    prepared, _ = do(here, "prepare", shop.overrides("prepare", *kept))
    assert (prepared["train"], prepared["masks"]["kept"]) == (10, 4)
    with serving(TokenServer(ChatTemplate(model).stop_ids[0])) as server:
        ask = [*kept, f"generator.endpoints=[{server.url}]"]
        told = here.refused("regenerate", shop.overrides("regenerate", ask[-1]), shop.stored / "answers")
        assert "was prepared with corpus.answers=keep" in told
        given, output = do(here, "regenerate", shop.overrides("regenerate", *ask, "--show", "20"))
        assert (given["answered_now"], given["brought_now"]) == (6, 4)
        assert len(server.asked) == 7, "the prompts without an answer, and the probe"
        before = contents(shop.stored / "answers" / "parts")
        random.Random(0).shuffle(rows)
        write_rows(tmp_path / "prompts.jsonl", rows)
        do(here, "prepare", shop.overrides("prepare", *kept))
        again, _ = do(here, "regenerate", shop.overrides("regenerate", *ask))
        assert (again["answered_now"], again["brought_now"], len(server.asked)) == (0, 0, 7)
        assert contents(shop.stored / "answers" / "parts") == before
        other = ["corpus.answers=keep", "corpus.unstable_template=last_turn", ask[-1]]
        told = here.refused("regenerate", shop.overrides("regenerate", *other), shop.stored / "answers")
        assert "brought_answers: there {'unstable_template': 'refuse'}, asked {'unstable_template': 'last_turn'}" in told
    card = given["card"]
    assert card["answers_given_by"]["brought along by the rows"] == "6 rows"
    assert card["speed"]["answer_tokens"] == given["generated_tokens"], "not the tokens that nobody generated"
    assert given["summary"]["unusable"]["truncated"] >= 1
    assert output.count("tokens supervised") == len(training_rows_of(shop, model))

    cached, _ = do(here, "cache", shop.overrides("cache", "producer.engine=hf", "producer.dtype=float32", *kept))
    cache = ObjectStore(StorageSettings(str(shop.stored / "cache")))
    assert load_contract(cache).capture.mask_rule.endswith("; answers that rows brought along too")
    found = samples(cache)
    assert cached["cached"] == len(found) == len(training_rows_of(shop, model))
    assert cached["skipped"][JOINED] == 1
    masks = [value for sample in found.values() for value in mask_of(sample)]
    assert (cached["supervised_tokens"], cached["tokens"]) == (sum(masks), len(masks))
    tokenizer = AutoTokenizer.from_pretrained(model)
    by_ids = {tuple(sample.input_ids.tolist()): sample for sample in found.values()}
    engine = HfEngine(EngineSettings(str(model), load_contract(cache).capture.layer_ids, engine="hf", dtype="float32", max_length=128))
    for talk in [*TALKS, long[:2]]:  # of the long one what fits, up to the last whole answer
        ids, mask = written(tokenizer, talk)
        sample = by_ids[tuple(ids)]
        assert mask_of(sample) == mask
        (states,) = engine.prefill([ids])
        assert np.array_equal(sample.context, to_bf16(states.context.numpy()))
        assert np.array_equal(sample.last_hidden, to_bf16(states.last_hidden.numpy()[[p - 1 for p, on in enumerate(mask) if on]]))
    told = here.refused("cache", shop.overrides("cache", "producer.one_pass=true", *kept), shop.stored)
    assert "one_pass" in told


def training_rows_of(shop: Workshop, model: Path) -> list[AnsweredRow]:
    """The usable answers, one for each row that training reads: here only the second of `TALKS` has two."""
    stop, rows = ChatTemplate(model).stop_ids[0], list(AnswerStore(ObjectStore(StorageSettings(str(shop.stored / "answers")))))
    whole = [row for row in rows if len(row.answer_ids) > 1 and row.answer_ids[-1] == stop]
    later = {(row.conversation_id, row.turn) for row in whole}
    return [row for row in whole if (row.conversation_id, row.turn + 1) not in later]


def talk(*turns: str) -> Conversation:
    return Conversation(tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(turns)), "src", "chat")


def brought(template: ChatTemplate, conversation: Conversation, max_length: int = 1000, policy: str = "refuse") -> list[AnsweredRow]:
    return brought_rows(conversation, template, BroughtSettings(policy, False, max_length))


def test_rows_that_bring_answers_join_again_to_what_was_masked(tmp_path: Path) -> None:
    template = ChatTemplate(save_target(tmp_path, FAMILIES["llama3"]))
    conversation = talk(*(f"turn {n}" for n in range(8)))
    rows, masked = brought(template, conversation), mask_conversation(conversation, template)
    assert [row.turn for row in rows] == list(range(4))
    (joined,) = training_rows(rows)
    assert (joined.input_ids.tolist(), joined.spans) == (masked.input_ids.tolist(), masked.spans)
    for limit in range(len(masked.input_ids)):
        short = brought(template, conversation, limit) if limit > 1 else []
        ends = [row.span[1] for row in short if row.finish_reason == "stop"]
        assert ends == [stop for _, stop in masked.spans if stop <= limit]
        assert all(row.span[1] == limit for row in short if row.finish_reason == "length"), "what was cut is known to be"
        assert sum(row.finish_reason == "length" for row in short) <= 1


def test_what_has_no_mask_is_a_failed_row_that_says_why(tmp_path: Path) -> None:
    template = ChatTemplate(save_target(tmp_path, FAMILIES["qwen3"]))
    conversation = talk("a", "One.", "b", "Two.")
    (refused,) = brought(template, conversation)
    assert (refused.finish_reason, refused.error) == ("failed", "no mask: not_prefix_stable")
    (last,) = brought(template, conversation, policy="last_turn")
    assert (last.turn, template.decode(last.answer_ids)) == (1, "Two.<|im_end|>")
    (short,) = brought(template, talk("a", "One."), max_length=5)
    assert short.error == "no answer of two tokens within max_length=5"


# -- turns


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> CacheRecipe:
    root, template = ObjectStore(StorageSettings(str(tmp_path))), ChatTemplate(model)
    made = CacheRecipe(
        cache=root.child("cache"),
        answers=root.child("answers"),
        contract=Contract(target_identity(model, "tiny"), Capture((0, 3), 48, "lossless")),
        engine=EngineSettings(str(model), (0, 3), engine="hf", dtype="float32", max_length=48),
        mask_token_id=template.vocabulary()["<|reserved_0|>"],
        stop_ids=template.stop_ids,
        settings=ProducerSettings(),
    )
    ensure_contract(made.cache, made.contract)
    return made


def turns(name: str, stop: int, seed: int, breaks: Sequence[int] = (), count: int = 3, reason: str = "stop") -> list[AnsweredRow]:
    """Answers of one conversation; each prompt continues all ids before, but for the turns in `breaks`. The last one ends as told."""
    draw, known, rows = np.random.default_rng(seed), [], list[AnsweredRow]()
    for turn in range(count):
        if turn in breaks:
            known[1] += 1  # as where a template drops an earlier thought
        prompt = [*known, *draw.integers(10, 200, 4).tolist()]
        answer = [*draw.integers(10, 200, 5).tolist(), stop]
        last = turn == count - 1
        rows.append(
            AnsweredRow(name, turn, "src", "chat", prompt, answer[:-1] if last and reason != "stop" else answer, reason if last else "stop")
        )
        known = [*prompt, *answer]
    return rows


@pytest.mark.parametrize("lease_rows", [2, 100])
def test_turns_that_continue_one_another_are_one_row_of_the_cache_however_leases_fall(recipe: CacheRecipe, lease_rows: int) -> None:
    stop = recipe.stop_ids[0]
    asked = {
        "a": turns("a", stop, 0),
        "b": turns("b", stop, 1, breaks=[1]),
        "c": turns("c", stop, 2, breaks=[1, 2]),
        "d": turns("d", stop, 3, reason="length"),  # the last turn is not used, the others are
        "e": turns("e", stop, 4, count=6),  # longer than max_length after the fifth turn
        "f": turns("f", stop, 5, count=1),
    }
    expected = {"a.2": [(4, 10), (14, 20), (24, 30)], "b.0": [(4, 10)], "b.2": [(14, 20), (24, 30)], "c.0": [(4, 10)]}
    expected |= {"c.1": [(14, 20)], "c.2": [(24, 30)], "d.1": [(4, 10), (14, 20)], "f.0": [(4, 10)]}
    expected |= {"e.3": [(4, 10), (14, 20), (24, 30), (34, 40)]}
    answers = AnswerStore(recipe.answers)
    for names in ("abc", "def"):
        rows = [row for name in names for row in asked[name]]
        answers.register(write_part(recipe.answers, rows, {}, "test"), 1.0)
    ledger = Ledger(recipe.cache, answers.rows, LedgerSettings(lease_rows))
    Producer("p", recipe).run(ledger)
    assert (ledger.status().done, ledger.status().failed) == (answers.rows, ())
    found = samples(recipe.cache)
    assert {name: [tuple(span) for span in sample.spans.tolist()] for name, sample in found.items()} == expected
    engine, by_id = HfEngine(recipe.engine), {row.row_id: row for row in answers}
    for name, sample in found.items():
        ids = [*by_id[name].prompt_ids.tolist(), *by_id[name].answer_ids.tolist()]
        assert sample.input_ids.tolist() == ids
        (states,) = engine.prefill([ids])
        assert np.array_equal(sample.context, to_bf16(states.context.numpy()))
    reasons = {row.row_id: row.reason for commit in read_commits(recipe.cache) for row in commit.skipped}
    assert reasons.keys() == by_id.keys() - expected.keys()
    assert {name for name, reason in reasons.items() if reason != JOINED} == {"d.2", "e.4", "e.5"}
    assert (reasons["d.2"], reasons["e.5"]) == ("truncated", "longer than max_length")
    supervised = [token for sample in found.values() for token, on in zip(sample.input_ids.tolist(), mask_of(sample), strict=True) if on]
    counts = np.bincount(supervised, minlength=320)
    best = sorted(sorted(range(320), key=lambda token: (-counts[token], token))[:20])
    assert frequent_tokens(answers, set(found), recipe.stop_ids, 20, 320) == tuple(best)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_corpus_with_answers_is_trained_on_without_the_target_giving_any(tmp_path: Path) -> None:
    """Real processes, real vLLM: prepare, regenerate, cache, verify, train."""
    shop, more = Workshop(tmp_path), ["corpus.answers=keep"]
    write_tiny_model(tmp_path / "tiny llama", "llama")
    write_rows(
        tmp_path / "prompts.jsonl", [messages([("user", f"What is {n}?"), ("assistant", f"It is {n * n}, I think.")]) for n in range(12)]
    )
    write_rows(tmp_path / "heldout.jsonl", [{"prompt": "Name a colour."}])
    run("prepare", shop.overrides("prepare", *more))
    given, _ = run("regenerate", shop.overrides("regenerate", *more))
    assert (given["answered_now"], given["brought_now"], given["summary"]["usable"]) == (0, 12, 12)
    cached, _ = run("cache", shop.overrides("cache", *more))
    assert (cached["cached"], cached["skipped"]) == (12, {})
    verified, _ = run("cache", [*shop.overrides("cache", *more), "--verify"])
    assert verified["problems"] == []
    trained, _ = run("train", shop.overrides("train", *more, "tracking=none"))
    assert trained["steps_now"] == 6
