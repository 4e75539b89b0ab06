"""`python -m pipelines.prepare` on a tiny target: mixed sources, decontamination, lengths, masks, and what it tells of all that."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipeline_runs import ENVIRONMENT, Here, result_of, write_rows
from tiny_models import write_tiny_model

from pipelines.prepare import read_conversations
from storage.object_store import ObjectStore, StorageSettings

FERRY = "A ferry carries 12 cars on each of its 9 daily trips, and every third trip is half empty. How many cars cross in a week?"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny llama", "llama")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    for name, value in {**ENVIRONMENT, "COLUMNS": "140"}.items():
        monkeypatch.setenv(name, value)
    return Here(monkeypatch, capsys)


def prepare(here: Here, target: Path, out: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    code, output, errors = here.run("prepare", [f"target={target}", "corpus=jsonl", f"output={out}", *overrides])
    assert code == 0, errors
    return result_of(output), output


def stored(out: Path, part: str) -> list[str]:
    rows = read_conversations(ObjectStore(StorageSettings(str(out))).child("corpora/jsonl"), part)
    return [row.messages[-1].content for row in rows]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], "source": "blend"}


def test_a_mixture_is_counted_to_the_last_row(here: Here, target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Name {n} rivers"} for n in range(30)]
    write_rows(tmp_path / "a.jsonl", [*rows, rows[0], {"prompt": " "}, {"prompt": FERRY}, {"prompt": "word " * 300}, {"note": 1}])
    (tmp_path / "blend").mkdir()
    pq.write_table(pa.Table.from_pylist([chat(f"Why {n}?", "Because.") for n in range(30)]), tmp_path / "blend" / "train.parquet")
    (tmp_path / "bench").mkdir()
    write_rows(tmp_path / "bench" / "gsm8k.jsonl", [{"turns": [FERRY + BOXED]}])
    sources = f"[{{name: {tmp_path}/a.jsonl, weight: 1}}, {{name: hf:{tmp_path}/blend, weight: 0.5, domain: mixed}}]"
    result, output = prepare(
        here, target, tmp_path / "out", f"corpus.train={sources}", "corpus.max_tokens=250", f"corpus.benchmarks={tmp_path}/bench"
    )
    first, second = result["sources"]
    assert first["dropped"] == {"benchmark_overlap": 1, "duplicate": 1, "empty_turn": 1, "no_known_field": 1, "too_long": 1}
    assert (first["read"], first["kept"], first["not_drawn"]) == (35, 30, 0)
    assert (second["read"], second["kept"], second["not_drawn"]) == (30, 15, 15)
    assert result["train"] + result["heldout"] == 45
    assert result["dropped"] == first["dropped"]
    assert set(result["train_by_source"]) == {"a", "blend"}
    assert sum(part["rows"] for part in result["train_by_source"].values()) == result["train"]
    assert sum(part["tokens"] for part in result["train_by_source"].values()) == result["tokens"]["train"] > 0
    assert sum(one["rows"] for one in result["tokens"]["histogram"]) == result["train"]
    assert result["decontamination"]["found"] == {"gsm8k": 1}
    assert result["decontamination"]["benchmarks"]["gsm8k"]["rows"] == 1
    assert "tiny_llama" in result["tokens"]["counted"]
    assert not set(stored(tmp_path / "out", "train")) & set(stored(tmp_path / "out", "heldout"))
    for told in ("1 too_long", "1 benchmark_overlap", "█", "training prompts by source", "questions repeated by prompts: 1 gsm8k"):
        assert told in output


def test_the_order_of_rows_and_sources_changes_nothing(here: Here, target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Name {n} rivers"} for n in range(40)]
    write_rows(tmp_path / "a.jsonl", rows[:30])
    write_rows(tmp_path / "b.jsonl", rows[20:])
    weighted = [f"{{name: {tmp_path}/{name}.jsonl, weight: {weight}}}" for name, weight in (("a", 2), ("b", 1))]
    parts = []
    for turn in range(2):
        out = tmp_path / f"out{turn}"
        prepare(here, target, out, f"corpus.train=[{', '.join(weighted)}]", "corpus.heldout_share=0.3")
        parts.append((stored(out, "train"), stored(out, "heldout")))
        weighted.reverse()
        write_rows(tmp_path / "a.jsonl", rows[29::-1])
    assert parts[0] == parts[1]
    assert len(parts[0][0] + parts[0][1]) == 30


def test_what_is_stored_is_read_back_whatever_characters_it_holds(here: Here, target: Path, tmp_path: Path) -> None:
    odd = ["two\u2028lines", "next\x85line", "form\x0cfeed \x1c\x1d\u2029", 'a "quote" \\ and é 🙂', "tab\tand\nbreak"]
    write_rows(tmp_path / "a.jsonl", [{"prompt": f"Why {text}?"} for text in odd])
    prepare(here, target, tmp_path / "out", f"corpus.train={tmp_path}/a.jsonl", "corpus.heldout_share=0")
    assert sorted(stored(tmp_path / "out", "train")) == sorted(f"Why {text}?" for text in odd)


@pytest.mark.parametrize("flag", [["--show", "2"], ["--show=2"], ["show=2"]])
def test_show_prints_prompts_as_the_target_reads_them(here: Here, target: Path, tmp_path: Path, flag: list[str]) -> None:
    write_rows(tmp_path / "a.jsonl", [chat(f"Why {n}?", "Because.") for n in range(6)])
    _, output = prepare(here, target, tmp_path / "out", f"corpus.train={tmp_path}/a.jsonl", "corpus.heldout_share=0", *flag)
    assert output.count("answer to come") == 2
    assert output.count("<|im_end|>\n<|im_start|>assistant\n") == 2
    assert "Because." not in output


def test_answers_that_rows_bring_are_kept_masked_and_shown_on_request(here: Here, target: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [*(chat(f"Why {n}?", "Because.") for n in range(4)), chat("Odd?", "\n\n x"), {"prompt": "Bare?"}])
    overrides = [f"corpus.train={tmp_path}/a.jsonl", "corpus.heldout_share=0", "corpus.answers=keep", "--show", "9"]
    result, output = prepare(here, target, tmp_path / "out", *overrides)
    assert stored(tmp_path / "out", "train").count("Because.") == 4
    masks = result["masks"]
    assert masks["read"] == masks["kept"] + sum(masks["refused"].values()) == 5
    assert 0 < masks["supervised_share"] < 1
    assert result["train"] == masks["kept"] + 1
    assert result["dropped"] == masks["refused"]
    assert output.count("tokens supervised") == masks["kept"]
    assert output.count("answer to come") == 1
    assert f"{masks['supervised_share']:.1%} of the tokens of {masks['kept']} answered rows" in output


def test_benchmarks_out_of_reach_are_replaced_by_the_mini_set_and_named_so(
    here: Here, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_rows(tmp_path / "a.jsonl", [{"prompt": "Name a river."}])
    result, output = prepare(
        here, target, tmp_path / "out", f"corpus.train={tmp_path}/a.jsonl", "corpus.heldout_share=0", "corpus.benchmarks=hub"
    )
    assert {one["origin"] for one in result["decontamination"]["benchmarks"].values()} == {"bundled mini set"}
    assert "gsm8k-mini" in output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--show", "many"], "--show 3"),
        (["--show"], "--show 3"),
        (["corpus.train=[{name: a.jsonl, wieght: 2}]"], "wieght"),
        (["corpus.train=[]"], "corpus.train"),
        (["corpus.train=[{name: a.jsonl, weight: -1}]"], "weight=-1"),
        (["corpus.train=hf:no/such/folder/here"], "hf:"),
        (["corpus.benchmarks=/no/such/folder"], "gsm8k.jsonl"),
        (["corpus.answers=maybe"], "corpus.answers"),
        (["corpus.max_tokens=1"], "no training prompt left"),
    ],
)
def test_mistakes_are_one_line(here: Here, target: Path, tmp_path: Path, overrides: list[str], words: str) -> None:
    write_rows(tmp_path / "a.jsonl", [{"prompt": f"Name {n} rivers."} for n in range(4)])
    out = tmp_path / "out"
    told = here.refused("prepare", [f"target={target}", "corpus=jsonl", f"corpus.train={tmp_path}/a.jsonl", f"output={out}", *overrides])
    assert words in told


def test_perfectblend_is_the_default_of_its_conf(here: Here) -> None:
    code, output, _ = here.run("prepare", ["corpus=perfectblend", "--cfg", "job"])
    assert code == 0
    assert "name: hf:mlabonne/open-perfectblend" in output
    assert "benchmarks: hub" in output
