"""Answers by a real vLLM, under Ray or behind a URL: token ids kept, resume, turns, what cannot be asked; and the store for them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
import pytest
import torch
from pipeline_runs import Workshop, run, start, write_rows
from tiny_models import write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.answer_pool import GeneratorSettings, even_share, regenerate, vllm_answerers
from actors.answers import AnswerStore, Part, answers_hash, write_part
from actors.cluster import ClusterSettings, cluster
from actors.engines.base import AnswerSettings, EngineSettings
from actors.errors import ActorError
from corpus.answers import AnsweredRow
from corpus.conversation import Conversation, Message
from corpus.errors import CorpusError
from corpus.rows import parse_row
from corpus.template import ChatTemplate
from storage.object_store import ObjectStore, StorageSettings

MAX_LENGTH, NEW_TOKENS = 128, 24
SETTINGS = GeneratorSettings(batch_conversations=32, part_rows=3)


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    with cluster(ClusterSettings("local", cpus=2)):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", tied=False)


def asks(*turns: str) -> Conversation:
    return Conversation(tuple(Message("user", turn) for turn in turns), "test", "chat")


def conversations() -> list[Conversation]:
    """Questions of one and two turns; two that the context is too short for, and one that fills it."""
    single = [asks(f"What is {n} plus {n * n}?") for n in range(10)]
    double = [asks(f"Name {n} things.", f"And then, {n}?") for n in range(6)]
    return [*single, *double, asks("x" * 200), asks("y" * MAX_LENGTH), asks("z " * 50)]


@dataclass(frozen=True)
class HuggingFace:
    """The same target, greedily, by transformers alone."""

    folder: Path

    @lru_cache  # noqa: B019
    def load(self):
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(self.folder)

    def prompt(self, messages: list[dict]) -> tuple[str, list[int]]:
        _, tokenizer = self.load()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.load()[1].decode(ids)

    def answer(self, prompt: list[int], limit: int) -> list[int]:
        net, _ = self.load()
        ids = torch.tensor([prompt])
        return net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)[0, len(prompt) :].tolist()


def engine_settings(model: Path) -> EngineSettings:
    return EngineSettings(str(model), (), dtype="float32", max_length=MAX_LENGTH, batch_tokens=256, batch_rows=16)


def sampling(model: Path) -> AnswerSettings:
    return AnswerSettings(temperature=0.0, max_new_tokens=NEW_TOKENS, stop_token_ids=ChatTemplate(model).stop_ids)


def answer_all(asked: list[Conversation], answers: AnswerStore, model: Path, on_part) -> None:
    makers = vllm_answerers(1, 1, 0, engine_settings(model), sampling(model), SETTINGS, answers)
    regenerate(asked, answers, makers, SETTINGS, on_part)


def check_rows(rows: list[AnsweredRow], asked: list[Conversation], model: Path) -> None:
    """Every row is what Hugging Face makes of the conversation, token for token."""
    reference, (stop,) = HuggingFace(model), ChatTemplate(model).stop_ids
    by_id = {row.row_id: row for row in rows}
    assert len(by_id) == len(rows)
    expected = set()
    for conversation in asked:
        history: list[dict] = []
        for turn, message in enumerate(conversation.messages):
            history.append({"role": "user", "content": message.content})
            row = by_id[f"{conversation.id}.{turn}"]
            expected.add(row.row_id)
            text, ids = reference.prompt(history)
            prompt = row.prompt_ids.tolist()
            # An answer's text may spell a control token, which stays text in the next prompt: there only the characters agree.
            assert prompt == ids if turn == 0 else reference.decode(prompt) == text
            assert (row.source, row.domain, row.turn) == ("test", "chat", turn)
            room = MAX_LENGTH - len(prompt)
            if room <= 1:
                assert (row.finish_reason, len(row.answer_ids)) == ("failed", 0)
                assert f"the prompt's {len(prompt)} tokens leave no room in max_length={MAX_LENGTH}" in row.error
                break
            answer = reference.answer(prompt, min(NEW_TOKENS, room))
            assert row.answer_ids.tolist() == answer
            assert row.finish_reason == ("stop" if answer[-1] == stop else "length")
            if row.finish_reason != "stop":
                break  # what was cut off is not built upon
            history.append({"role": "assistant", "content": reference.decode(answer[:-1])})
    assert set(by_id) == expected


def test_answers_keep_token_ids_and_resume_by_content(running_ray, model, tmp_path):
    store, asked = ObjectStore(StorageSettings(str(tmp_path))), conversations()
    parts: list[Part] = []

    class PulledPlugError(Exception):
        pass

    def pull_the_plug(part: Part) -> None:
        parts.append(part)
        if len(parts) == 2:
            raise PulledPlugError

    with pytest.raises(PulledPlugError):
        answer_all(asked, AnswerStore(store), model, pull_the_plug)
    interrupted = AnswerStore(store)
    first = list(interrupted)
    assert [part.key for part in interrupted.parts] == [part.key for part in parts]
    assert interrupted.rows == len(first) == sum(part.rows for part in parts)
    assert 0 < len(interrupted.conversation_ids()) < len(asked)

    # The rest, from input in another order: what was answered keeps its place and is not asked again.
    answer_all(asked[::-1], AnswerStore(store), model, parts.append)
    answers = AnswerStore(store)
    rows = list(answers)
    assert rows[: len(first)] == first
    assert [part.key for part in answers.parts] == [part.key for part in parts]
    assert answers.read(2, 6) == rows[2:6]
    check_rows(rows, asked, model)

    # What this corpus exercises at all.
    reasons = [row.finish_reason for row in rows]
    assert set(reasons) == {"stop", "length", "failed"}
    assert reasons.count("failed") == 2
    assert any(row.turn == 1 for row in rows)
    assert any(len(row.prompt_ids) + len(row.answer_ids) == MAX_LENGTH for row in rows)

    before = answers_hash(answers)
    answer_all(asked[3:] + asked[:3], answers, model, lambda part: pytest.fail("nothing was left to answer"))
    assert answers_hash(AnswerStore(store)) == before


@pytest.mark.slow
def test_what_a_killed_engine_left_undone_is_answered_by_the_next(running_ray, model, tmp_path):
    store, asked, parts = ObjectStore(StorageSettings(str(tmp_path))), conversations(), []

    def kill_once(part: Part) -> None:
        parts.append(part)
        if len(parts) == 1:
            found = [p for p in psutil.Process().children(recursive=True) if (p.cmdline() or [""])[0].startswith("ray::VllmGenerator")]
            os.kill(found[-1].pid, signal.SIGKILL)

    answer_all(asked, AnswerStore(store), model, kill_once)
    check_rows(list(AnswerStore(store)), asked, model)


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """vLLM's own OpenAI server on this machine, as a person starts it; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host=127.0.0.1", f"--port={port}", f"--model={model}", "--served-model-name=tiny", "--dtype=float32", "--enforce-eager"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options, f"--max-model-len={MAX_LENGTH}", "--max-num-seqs=8"]
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(command, env={**os.environ, **quiet}, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.terminate()
        server.wait(timeout=60)
        for process in psutil.wait_procs(family, timeout=20)[1]:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllms_own_server_answers_with_the_same_token_ids(model, tmp_path):
    """The whole job against it: what is stored, a second run that asks nothing, and a server that takes shorter rows than are asked for."""
    shop = Workshop(tmp_path)
    rows = [{"turns": [message.content for message in c.messages], "source": "test"} for c in conversations()]
    asked = [parse_row(row, "", "chat") for row in rows]
    (tmp_path / "tiny llama").symlink_to(model)
    write_rows(tmp_path / "prompts.jsonl", rows)
    write_rows(tmp_path / "heldout.jsonl", [{"prompt": "Name a colour."}])
    run("prepare", shop.overrides("prepare"))
    with vllm_server(model, tmp_path / "server.log") as url:
        sampled = [f"generator.endpoints=[{url}]", "target.sampling.temperature=0", f"target.sampling.max_new_tokens={NEW_TOKENS}"]
        overrides = shop.overrides("regenerate", *sampled, "generator.batch_rows=4")
        result, _ = run("regenerate", overrides)
        again, _ = run("regenerate", overrides)
        process = start("regenerate", [*overrides, "generator.max_length=256", "target.name=longer"])
        _, refused = process.communicate(timeout=280)
    stored = shop.output / model.name / "jsonl" / "answers"
    check_rows(list(AnswerStore(ObjectStore(StorageSettings(str(stored))))), asked, model)
    assert (result["answered_now"], again["answered_now"]) == (len(asked), 0)
    assert list(result["card"]["answers_given_by"]) == [f"tiny at {url}"]
    assert process.returncode == 2
    assert "takes rows of 128 tokens (its max_model_len), generator.max_length=256 asks for more" in refused


@pytest.mark.parametrize("conversations", [1, 2, 7, 367, 512, 1025, 2676, 1_350_000])
@pytest.mark.parametrize("engines", [1, 2, 8])
def test_every_engine_gets_as_many_batches_of_about_one_size(conversations, engines):
    share = even_share(conversations, engines, most=512)
    assert 1 <= share <= 512
    batches = [min(share, conversations - start) for start in range(0, conversations, share)]
    dealt = [sum(batches[engine::engines]) for engine in range(engines)]
    # What one engine is left with alone is a rounding of every batch, never a whole one.
    assert max(dealt) - min(dealt) <= max(len(batches) + engines, 1)


def test_an_engine_that_cannot_start_is_named_at_once(running_ray, model, tmp_path):
    answers = AnswerStore(ObjectStore(StorageSettings(str(tmp_path))))
    makers = vllm_answerers(1, 1, 0, engine_settings(tmp_path / "missing"), sampling(model), SETTINGS, answers)
    with pytest.raises(ActorError, match=r"the answer engine cannot start: .*missing"):
        regenerate([asks("Hello?")], answers, makers, SETTINGS, lambda part: None)
    assert AnswerStore(answers.store).rows == 0


# -- the store, without Ray


def stored_row(name: str, tokens: int = 3) -> AnsweredRow:
    return AnsweredRow(name, 0, "test", "chat", [1, 2], list(range(3, 3 + tokens)), "stop")


@pytest.fixture
def filled(tmp_path) -> AnswerStore:
    """Five rows in two parts."""
    answers = AnswerStore(ObjectStore(StorageSettings(str(tmp_path))))
    answers.claim({"target": "tiny", "sampling": {"temperature": 0.0}})
    for names in ("ab", "cde"):
        answers.register(write_part(answers.store, [stored_row(name) for name in names], answers.settings, "test"), 2.0)
    return answers


def test_row_numbers_never_change(filled):
    assert [row.conversation_id for row in filled] == list("abcde")
    assert [row.conversation_id for row in AnswerStore(filled.store).read(1, 4)] == list("bcd")
    again = AnswerStore(filled.store)
    again.register(write_part(again.store, [stored_row("f", 4)], {}, "test"), 1.0)
    assert [row.conversation_id for row in AnswerStore(filled.store)] == list("abcdef")
    assert [part.answer_tokens for part in again.parts] == [6, 9, 4]
    assert again.parts[1].reasons == {"stop": 3}
    with pytest.raises(ActorError, match="has 6 rows; rows 4 to 6 were asked for"):
        again.read(4, 7)


def test_a_part_without_its_index_entry_does_not_count(filled):
    write_part(filled.store, [stored_row("x")], {}, "test")
    assert AnswerStore(filled.store).rows == 5


def test_a_hole_in_the_index_is_named(filled):
    filled.store.delete("index/0000000000-00000002.json")
    with pytest.raises(ActorError, match="has a hole: rows 0 to 1 are missing"):
        AnswerStore(filled.store)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"key": "parts/x.arrow", "rows": 3}'])
def test_a_damaged_index_entry_is_named(filled, damage):
    filled.store.put("index/0000000002-00000003.json", damage)
    with pytest.raises(ActorError, match=r"index/0000000002-00000003\.json is damaged .*remove it and run `regenerate` again"):
        AnswerStore(filled.store)


def test_a_foreign_file_in_the_index_is_named(filled):
    filled.store.put("index/notes.txt", b"hello")
    with pytest.raises(ActorError, match=r"index/notes\.txt is not an index entry"):
        AnswerStore(filled.store)


def test_an_index_entry_that_counts_otherwise_than_its_part_is_named(filled):
    entry = json.loads(filled.store.get("index/0000000002-00000003.json"))
    filled.store.put("index/0000000002-00000004.json", json.dumps({**entry, "rows": 4}).encode())
    filled.store.delete("index/0000000002-00000003.json")
    with pytest.raises(ActorError, match="holds 3 rows, its index says 4"):
        list(AnswerStore(filled.store))


def test_a_damaged_part_is_named(filled):
    key = filled.parts[1].key
    data = filled.store.get(key)
    filled.store.put(key, data[: len(data) // 2])
    with pytest.raises(CorpusError, match=key):
        AnswerStore(filled.store).read(2, 3)


def test_other_settings_are_refused_and_each_is_named(filled):
    filled.claim({"target": "tiny", "sampling": {"temperature": 0.0}})
    with pytest.raises(ActorError) as refused:
        AnswerStore(filled.store).claim({"target": "large", "sampling": {"temperature": 0.7}, "max_length": 9})
    message = str(refused.value)
    for told in (
        "target: there 'tiny', asked 'large'",
        "sampling: there {'temperature': 0.0}, asked {'temperature': 0.7}",
        "max_length: there None, asked 9",
    ):
        assert told in message
    assert json.loads(filled.store.get("settings.json"))["target"] == "tiny"


def test_a_folder_without_rows_may_be_claimed_anew(tmp_path):
    store = ObjectStore(StorageSettings(str(tmp_path)))
    AnswerStore(store).claim({"temperature": 0.7})
    AnswerStore(store).claim({"temperature": 0.2})
    assert json.loads(store.get("settings.json")) == {"temperature": 0.2}


def test_a_second_writer_is_noticed_and_takes_nothing_away(filled):
    late = AnswerStore(filled.store)
    filled.register(write_part(filled.store, [stored_row("f")], {}, "test"), 1.0)
    with pytest.raises(ActorError, match="another `regenerate` is writing"):
        late.register(write_part(late.store, [stored_row("g"), stored_row("h")], {}, "test"), 1.0)
    assert [row.conversation_id for row in AnswerStore(filled.store)] == list("abcdef")


def test_parts_keep_who_answered_and_how_long_it_took(filled):
    assert [(part.engine, part.seconds) for part in AnswerStore(filled.store).parts] == [("test", 2.0)] * 2
