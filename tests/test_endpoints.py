"""Answers from servers that return token ids: a real HTTP server with every fault; resume and order as properties."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from corpus_templates import FAMILIES, relaxed, save_target
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_model
from token_server import TokenServer, answer_to, serving
from transformers import AutoTokenizer

from actors.answer_pool import GeneratorSettings, endpoint_answerers, regenerate
from actors.answers import AnswerStore, Part
from actors.engines.base import AnswerSettings
from actors.engines.endpoint import EndpointSettings
from actors.errors import ActorError
from corpus.answers import AnsweredRow, training_rows
from corpus.conversation import Conversation, Message
from corpus.template import ChatTemplate
from storage.object_store import ObjectStore, StorageSettings

MAX_LENGTH, NEW_TOKENS = 256, 24
SETTINGS = GeneratorSettings(batch_conversations=8, part_rows=3, pause_seconds=0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", tied=False)


@pytest.fixture(scope="module")
def template(model: Path) -> ChatTemplate:
    return ChatTemplate(model)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(StorageSettings(str(tmp_path / "answers")))


def asks(*turns: str) -> Conversation:
    return Conversation(tuple(Message("user", turn) for turn in turns), "test", "chat")


def many(count: int = 20) -> list[Conversation]:
    return [asks(f"What is {n} plus {n * n}?") for n in range(count)]


def answer_all(
    asked: Sequence[Conversation], store: ObjectStore, template: ChatTemplate, *urls: str, on_part=lambda part: None, **endpoint
) -> dict[str, str]:
    answers = AnswerStore(store)
    sampling = AnswerSettings(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=NEW_TOKENS, stop_token_ids=template.stop_ids)
    endpoints = [EndpointSettings(url, MAX_LENGTH, **{"retries": 2, "timeout_seconds": 5, **endpoint}) for url in urls]
    return regenerate(asked, answers, endpoint_answerers(endpoints, template, sampling, SETTINGS, answers), SETTINGS, on_part)


def rows_of(store: ObjectStore) -> dict[str, AnsweredRow]:
    rows = list(AnswerStore(store))
    by_id = {row.row_id: row for row in rows}
    assert len(by_id) == len(rows), "no row twice"
    return by_id


def check(store: ObjectStore, asked: Sequence[Conversation], template: ChatTemplate) -> None:
    """Every conversation has the rows that a turn-by-turn reading of it gives, and there are no others."""
    (stop,) = template.stop_ids
    found, expected = rows_of(store), set()
    for conversation in asked:
        history: list[Message] = []
        for turn, message in enumerate(conversation.messages):
            history.append(message)
            row = found[f"{conversation.id}.{turn}"]
            expected.add(row.row_id)
            prompt = template.prompt_ids(history)
            assert row.prompt_ids.tolist() == prompt
            ids, reason = answer_to(prompt, stop, min(NEW_TOKENS, MAX_LENGTH - len(prompt)))
            assert (row.answer_ids.tolist(), row.finish_reason) == (ids, reason)
            if reason != "stop":
                break
            history.append(Message("assistant", template.decode(ids[:-1])))
    assert set(found) == expected


def test_rows_are_the_servers_token_ids_turn_by_turn(store, template):
    asked = [*many(12), *(asks(f"Name {n} things.", "And then?", "Why?") for n in range(12))]
    with serving(TokenServer(template.stop_ids[0])) as server:
        server.delay = 0.02
        assert answer_all(asked, store, template, server.url, in_flight=3) == {}
        assert server.most == 3, "as many in flight as allowed, and no more"
    check(store, asked, template)
    rows = rows_of(store).values()
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    assert any(row.turn == 2 for row in rows)
    body = server.bodies[-1]
    told = {name: body[name] for name in ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids")}
    assert told == {
        "model": "tiny", "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": list(template.stop_ids),
    }  # fmt: skip
    assert all(len(body["prompt"]) + body["max_tokens"] <= MAX_LENGTH for body in server.bodies)
    assert {part.engine for part in AnswerStore(store).parts} == {f"tiny at {server.url}"}


def test_passing_trouble_costs_no_row(store, template):
    asked = many()

    def fault(server: TokenServer, body: dict) -> object:
        """The first time that a prompt comes, it meets one of the faults."""
        times = server.asked[tuple(body["prompt"])]
        kinds = [(429, {"error": {"message": "slow down"}}), (500, b"oops"), (503, b""), "hang up", (200, b'{"choices": [{')]
        return kinds[sum(body["prompt"]) % len(kinds)] if times == 1 and body["max_tokens"] > 1 else None

    with serving(TokenServer(template.stop_ids[0], fault=fault)) as server:
        assert answer_all(asked, store, template, server.url) == {}
    check(store, asked, template)


def test_pauses_between_attempts_grow_and_are_as_long_as_the_server_asks(store, template):
    answers, asked = [(503, b""), (500, b""), (429, b"", {"Retry_After": "1"})], list[float]()

    def fault(server: TokenServer, body: dict) -> object:
        if body["max_tokens"] > 1:
            asked.append(time.monotonic())
        return answers.pop(0) if answers and body["max_tokens"] > 1 else None

    with serving(TokenServer(template.stop_ids[0], fault=fault)) as server:
        assert answer_all(many(1), store, template, server.url, retries=3) == {}
    first, second, told = (after - before for before, after in itertools.pairwise(asked))
    assert 0.3 < first < second
    assert told >= 1
    check(store, many(1), template)


def test_a_slow_answer_is_asked_again(store, template):
    def fault(server: TokenServer, body: dict) -> None:
        if body["max_tokens"] > 1 and server.asked[tuple(body["prompt"])] == 1:
            time.sleep(1.5)

    asked = many(2)
    with serving(TokenServer(template.stop_ids[0], fault=fault)) as server:
        assert answer_all(asked, store, template, server.url, timeout_seconds=0.5) == {}
        assert max(server.asked.values()) == 2
    check(store, asked, template)


def test_what_a_dead_server_left_undone_is_answered_by_another(store, template):
    asked = many(40)
    with serving(TokenServer(template.stop_ids[0])) as survivor, serving(TokenServer(template.stop_ids[0])) as mortal:
        survivor.delay = mortal.delay = 0.02

        def dies(server: TokenServer, body: dict) -> object:
            return "hang up" if len(server.bodies) > 8 else None

        mortal.fault = dies
        assert answer_all(asked, store, template, survivor.url, mortal.url, in_flight=2, retries=0) == {}
        engines = {part.engine for part in AnswerStore(store).parts}
    assert engines == {f"tiny at {survivor.url}", f"tiny at {mortal.url}"}
    check(store, asked, template)


def test_when_no_server_is_left_the_answers_stay_and_another_run_goes_on(store, template):
    asked = many(20)
    mortal = TokenServer(template.stop_ids[0], fault=lambda server, body: "hang up" if len(server.bodies) > 8 else None)
    with serving(mortal), pytest.raises(ActorError, match=r"no answer engine is left.*127\.0\.0\.1.*What is answered is kept"):
        answer_all(asked, store, template, mortal.url, retries=0, in_flight=1)
    kept = rows_of(store)
    assert 0 < len(kept) < 20
    with serving(TokenServer(template.stop_ids[0])) as server:
        assert answer_all(asked, store, template, server.url) == {}
        assert len(server.bodies) == 20 - len(kept) + 1, "what is there is not asked again; one is the probe"
    check(store, asked, template)
    assert {name: row for name, row in rows_of(store).items() if name in kept} == kept


@pytest.mark.parametrize("fault", [(400, {"error": {"message": "bad prompt"}}), (500, b"oops"), "hang up"])
def test_a_row_that_is_always_refused_is_given_up_alone(store, template, fault):
    asked = many(12)
    bad = asked[5]
    poison = template.prompt_ids(bad.messages)
    with serving(TokenServer(template.stop_ids[0], fault=lambda _, body: fault if body["prompt"] == poison else None)) as server:
        given_up = answer_all(asked, store, template, server.url, retries=0)
        assert server.asked[tuple(poison)] == SETTINGS.max_attempts
    assert list(given_up) == [bad.id]
    assert server.url in given_up[bad.id]
    check(store, [c for c in asked if c is not bad], template)


@pytest.mark.parametrize("thinking", [False, True])
def test_thinking_is_left_out_unless_asked_for_and_earlier_thoughts_part_the_turns(store, tmp_path, thinking):
    folder = save_target(tmp_path / "qwen3", FAMILIES["qwen3"])
    template, tokenizer = ChatTemplate(folder), AutoTokenizer.from_pretrained(folder)
    said = tokenizer.encode("<think>\nHm.\n</think>\n\nFour.<|im_end|>" if thinking else "Four.<|im_end|>", add_special_tokens=False)

    def answers(server: TokenServer, body: dict) -> tuple[int, dict]:
        return 200, {"choices": [{"text": "", "finish_reason": "stop", "token_ids": said, "prompt_token_ids": body["prompt"]}]}

    settings = replace(SETTINGS, enable_thinking=thinking)
    with serving(TokenServer(0, fault=answers)) as server:
        stored = AnswerStore(store)
        makers = endpoint_answerers([EndpointSettings(server.url, MAX_LENGTH)], template, AnswerSettings(0.7), settings, stored)
        assert regenerate([asks("What is 2 + 2?", "And 3 + 1?")], stored, makers, settings, lambda part: None) == {}
    rows = sorted(rows_of(store).values(), key=lambda row: row.turn)
    opening = "<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n\n")
    first = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
    assert [template.decode(row.prompt_ids) for row in rows] == [
        first + opening,
        f"{first}<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nAnd 3 + 1?<|im_end|>\n{opening}",
    ]
    assert [row.answer_ids.tolist() for row in rows] == [said, said]
    assert [row.spans for row in training_rows(rows)] == [(rows[0].span,), (rows[1].span,)]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"text": "Paris", "finish_reason": "stop"}, "returns no token ids.*often not what the target produced.*vLLM"),
        ({"text": "Paris", "finish_reason": "stop", "token_ids": ["a"]}, "returns no token ids"),
        ({"finish_reason": "stop", "token_ids": [1], "prompt_token_ids": [7]}, "read other tokens than it was given"),
    ],
)
def test_a_server_without_token_ids_is_refused_before_anything_is_asked(store, template, choice, words):
    with serving(TokenServer(template.stop_ids[0], fault=lambda *_: (200, {"choices": [choice]}))) as server:
        with pytest.raises(ActorError, match=words):
            answer_all(many(), store, template, server.url)
        assert len(server.bodies) == 1
    assert AnswerStore(store).rows == 0


def test_keys_come_from_the_environment(store, template, monkeypatch):
    with serving(TokenServer(template.stop_ids[0])) as server:
        server.key = "sesame"
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ActorError, match="refuses requests without a key: set OPENAI_API_KEY"):
            answer_all(many(1), store, template, server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "mellon")
        with pytest.raises(ActorError, match="refuses the key in OPENAI_API_KEY") as refused:
            answer_all(many(1), store, template, server.url)
        assert "mellon" not in str(refused.value)
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        assert answer_all(many(1), store, template, server.url) == {}
    check(store, many(1), template)


def test_servers_that_do_not_fit_are_named(store, template):
    with serving(TokenServer(template.stop_ids[0], max_model_len=64)) as server:
        with pytest.raises(ActorError, match=r"takes rows of 64 tokens.*generator\.max_length=256"):
            answer_all(many(1), store, template, server.url)
        with pytest.raises(ActorError, match=r"serves tiny, not 'large'.*generator\.endpoint_model"):
            answer_all(many(1), store, template, server.url, model="large")
        with pytest.raises(ActorError, match="API's base, as in http"):
            answer_all(many(1), store, template, server.url.removesuffix("/v1"))
    with pytest.raises(ActorError, match="cannot be reached"):
        answer_all(many(1), store, template, server.url)


NUMBERS = itertools.count()
TURNS = st.lists(st.sampled_from(["Hello?", "Name three.", "And why?", "x " * 70]), min_size=1, max_size=3)


@settings(relaxed, max_examples=8)
@given(data=st.data(), talks=st.lists(TURNS, min_size=1, max_size=12))
def test_resume_is_idempotent_and_order_does_not_matter(data, talks, template):
    """Cut off after any part, grown, doubled and shuffled: at last each conversation is answered once, and a further run asks nothing."""
    asked = [asks(*turns, f"{n}") for n, turns in enumerate(talks)]
    store = ObjectStore(StorageSettings(f"memory://answers-{next(NUMBERS)}"))
    parts: list[Part] = []

    class PulledPlugError(Exception):
        pass

    stop_at = data.draw(st.integers(1, len(asked)), label="parts until the plug is pulled")

    def on_part(part: Part) -> None:
        parts.append(part)
        if len(parts) == stop_at:
            raise PulledPlugError

    first = data.draw(st.permutations(asked), label="first order")[: data.draw(st.integers(1, len(asked)), label="of them")]
    with serving(TokenServer(template.stop_ids[0])) as server:
        try:
            answer_all(first, store, template, server.url, on_part=on_part)
        except PulledPlugError:
            assert len(AnswerStore(store).parts) == stop_at
        kept = rows_of(store)
        answer_all(data.draw(st.permutations([*asked, *asked[:3]]), label="second order"), store, template, server.url)
        found = rows_of(store)
        assert {name: found[name] for name in kept} == kept
        before = len(server.bodies)
        answer_all(data.draw(st.permutations(asked), label="third order"), store, template, server.url)
        assert len(server.bodies) <= before + 1, "the probe alone"
        undisturbed = ObjectStore(StorageSettings(f"memory://answers-{next(NUMBERS)}"))
        answer_all(asked, undisturbed, template, server.url)
    assert found == rows_of(undisturbed)
