"""Benchmark sets by name from a local folder."""

from __future__ import annotations

import json

import pytest

from corpus.benchmarks import BENCHMARKS, load_benchmark
from corpus.errors import CorpusError


def write(folder, name, *rows):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_set_loads_in_order_with_its_domain(tmp_path, name):
    write(tmp_path, name, *({"turns": [f"{i}?", "and then?"]} for i in range(40)))
    rows = load_benchmark(name, tmp_path)
    assert [r.messages[0].content for r in rows] == [f"{i}?" for i in range(min(40, BENCHMARKS[name].rows))]
    assert {(r.source, r.domain) for r in rows} == {(name, BENCHMARKS[name].domain)}
    assert load_benchmark(name.upper().replace("-", "_"), tmp_path, limit=3) == rows[:3]


def test_unknown_names_missing_files_and_broken_rows_are_errors(tmp_path):
    with pytest.raises(CorpusError, match="Known are gsm8k"):
        load_benchmark("gsm9k", tmp_path)
    with pytest.raises(CorpusError, match="no prompt file"):
        load_benchmark("gsm8k", tmp_path)
    write(tmp_path, "gsm8k", {"turns": ["a"]}, {"turns": []})
    with pytest.raises(CorpusError, match="line 2: the list of turns is empty"):
        load_benchmark("gsm8k", tmp_path)
