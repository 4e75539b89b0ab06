"""Benchmark sets by name: from a folder, from data sets in the hub's layout, and the bundled mini set."""

from __future__ import annotations

import dataclasses
import json

import huggingface_hub
import pytest

from corpus.benchmarks import BENCHMARKS, MINI, load_benchmark, load_benchmarks, read_hub
from corpus.contamination import BenchmarkIndex
from corpus.errors import CorpusError
from corpus.sources import BUNDLED, SourceSpec, read_source

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LCB_START = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests. You will NOT return anything except for the program\n\n### Question:\n"
)
LCB_END = "\n\n### Answer: (use the provided format with backticks)"

# Rows as the hub has them, and the turns that they become.
HUB_ROWS = {
    "gsm8k": [({"question": "Six eggs?", "answer": "#### 6"}, ["Six eggs?" + BOXED])],
    "math500": [({"problem": "$1+1$", "solution": "2", "subject": "Algebra"}, ["$1+1$" + BOXED])],
    "aime25": [({"problem_idx": 1, "problem": "Find $b$.", "answer": 70}, ["Find $b$." + BOXED])],
    "humaneval": [
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n    pass\n", "test": "assert True"},
            ["Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n    pass\n\n```"],
        )
    ],
    "mbpp": [({"task_id": 2, "prompt": "Write a function.", "code": "x"}, ["Write a function."])],
    "livecodebench": [
        (
            {"question_content": "Count.", "starter_code": "", "platform": "atcoder"},
            [f"{LCB_START}Count.\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```{LCB_END}"],
        ),
        (
            {"question_content": "Sum.", "starter_code": "class S:\n    ", "platform": "leetcode"},
            [f"{LCB_START}Sum.\n\n### Format: Use the following code structure:\n```python\nclass S:\n    \n```{LCB_END}"],
        ),
    ],
    "mt-bench": [({"category": "writing", "prompt": ["One.", "Two."], "prompt_id": 81}, ["One.", "Two."])],
    "alpaca": [
        ({"instruction": "Rate it.", "input": "A film", "output": "x"}, None),
        ({"instruction": "Name it.", "input": "", "output": "y"}, ["Name it."]),
    ],
    "arena-hard-v2": [
        ({"uid": "1", "category": "creative_writing", "prompt": "A poem."}, None),
        ({"uid": "2", "category": "hard_prompt", "prompt": "Fix it."}, ["Fix it."]),
    ],
}


def write(folder, name, *rows):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def local_copy(name, folder, rows):
    """The benchmark with its data set in a folder, laid out as on the hub."""
    benchmark = BENCHMARKS[name]
    path = folder / (benchmark.hub.files[0] if benchmark.hub.files else f"{benchmark.hub.split}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    files = benchmark.hub.files[:1]
    return dataclasses.replace(benchmark, hub=dataclasses.replace(benchmark.hub, name=str(folder), subset=None, files=files))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_of_the_hub_become_turns_in_the_sets_wording(tmp_path, name):
    loaded = read_hub(local_copy(name, tmp_path, [row for row, _ in HUB_ROWS[name]]), 10)
    assert [[m.content for m in c.messages] for c in loaded.conversations] == [turns for _, turns in HUB_ROWS[name] if turns]
    assert {(c.source, c.domain) for c in loaded.conversations} == {(name, BENCHMARKS[name].domain)}
    assert (loaded.label, loaded.origin) == (name, f"hub data set {tmp_path}")


def test_no_more_rows_are_read_from_the_hub_than_the_protocol_uses(tmp_path):
    rows = [{"problem": f"{i}?"} for i in range(40)]
    copy = local_copy("aime25", tmp_path, rows)
    assert [c.messages[0].content for c in read_hub(copy, copy.rows).conversations] == [f"{i}?{BOXED}" for i in range(30)]


def test_a_data_set_of_another_layout_is_one_line(tmp_path):
    with pytest.raises(CorpusError, match=r"row 1 of .* has no field 'question'.*gsm8k\.jsonl"):
        read_hub(local_copy("gsm8k", tmp_path, [{"problem": "?"}]), 5)
    with pytest.raises(CorpusError, match=r"row 1 of .* empty_turn"):
        read_hub(local_copy("mbpp", tmp_path, [{"prompt": " "}]), 5)
    with pytest.raises(CorpusError, match="holds no row of Alpaca"):
        read_hub(local_copy("alpaca", tmp_path / "alpaca", [HUB_ROWS["alpaca"][0][0]]), 5)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_set_loads_from_a_folder_in_order_with_its_domain(tmp_path, name):
    write(tmp_path, name, *({"turns": [f"{i}?", "and then?"]} for i in range(40)))
    loaded = load_benchmark(name, tmp_path)
    rows = loaded.conversations
    assert [r.messages[0].content for r in rows] == [f"{i}?" for i in range(min(40, BENCHMARKS[name].rows))]
    assert {(r.source, r.domain) for r in rows} == {(name, BENCHMARKS[name].domain)}
    assert load_benchmark(name.upper().replace("-", "_"), tmp_path, limit=3).conversations == rows[:3]
    assert loaded.origin == str(tmp_path / f"{name}.jsonl")


def test_unknown_names_missing_files_and_broken_rows_are_errors(tmp_path):
    with pytest.raises(CorpusError, match="Known are gsm8k"):
        load_benchmark("gsm9k", tmp_path)
    with pytest.raises(CorpusError, match="no prompt file"):
        load_benchmark("gsm8k", tmp_path)
    with pytest.raises(CorpusError, match=r"no benchmark in .*gsm8k\.jsonl"):
        load_benchmarks(tmp_path)
    write(tmp_path, "gsm8k", {"turns": ["a"]}, {"turns": []})
    with pytest.raises(CorpusError, match="line 2: the list of turns is empty"):
        load_benchmark("gsm8k", tmp_path)


def test_a_folder_gives_the_sets_that_it_has(tmp_path):
    write(tmp_path, "mbpp", {"turns": ["a"]})
    write(tmp_path, "aime25", {"turns": ["b"]})
    write(tmp_path, "notes", {"turns": ["c"]})
    assert [loaded.label for loaded in load_benchmarks(tmp_path)] == ["aime25", "mbpp"]


@pytest.mark.parametrize("place", ["bundled", "hub"])
def test_the_mini_set_stands_in_without_a_network_and_says_so(place, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    sets = load_benchmarks(place)
    assert [loaded.benchmark.name for loaded in sets] == list(BENCHMARKS)
    assert {loaded.origin for loaded in sets} == {MINI}
    for loaded in sets:
        assert len(loaded.conversations) == 4
        assert {c.source for c in loaded.conversations} == {loaded.label} == {f"{loaded.benchmark.name}-mini"}
    assert len({c.near_key for loaded in sets for c in loaded.conversations}) == 36
    assert [len(c.messages) for c in load_benchmark("mt-bench", place).conversations] == [2] * 4
    assert all(c.messages[0].content.endswith(BOXED) for c in load_benchmark("gsm8k", place).conversations)


def test_the_bundled_prompts_repeat_no_question_of_the_mini_set():
    index = BenchmarkIndex([c for loaded in load_benchmarks("bundled") for c in loaded.conversations])
    assert not [row for name in BUNDLED for row in read_source(SourceSpec(name)).rows if index.match(row)]
