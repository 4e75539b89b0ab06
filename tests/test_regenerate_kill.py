"""`regenerate` killed with -9, Ray and all, and started again: the same rows as if nothing had happened, and none twice."""

import random
from pathlib import Path

import pytest
from pipeline_runs import Workshop, killed, run, write_rows
from tiny_models import write_tiny_model
from token_server import TokenServer, serving

from actors.answers import AnswerStore
from corpus.answers import AnsweredRow
from corpus.template import ChatTemplate
from storage.object_store import ObjectStore, StorageSettings

ROWS = 40


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("killed")
    write_tiny_model(folder / "tiny llama", "llama")
    write_rows(folder / "prompts.jsonl", [{"prompt": f"What is {n} plus {n * n}?"} for n in range(ROWS)])
    write_rows(folder / "heldout.jsonl", [{"prompt": "Name a colour."}])
    run("prepare", Workshop(folder).overrides("prepare"))
    return Workshop(folder)


def rows_of(folder: Path) -> dict[str, AnsweredRow]:
    rows = list(AnswerStore(ObjectStore(StorageSettings(str(folder)))))
    by_id = {row.row_id: row for row in rows}
    assert len(by_id) == len(rows), "no row twice"
    return by_id


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(shop: Workshop, tmp_path: Path) -> None:
    stop = ChatTemplate(shop.folder / "tiny llama").stop_ids[0]
    with serving(TokenServer(stop)) as server:
        server.delay = 0.3
        options = [f"generator.endpoints=[{server.url}]", "generator.part_rows=2", "generator.batch_rows=4"]
        overrides = shop.overrides("regenerate", *options, "target.name=killed")
        answers = shop.output / "killed" / "jsonl" / "answers"
        assert killed("regenerate", overrides, answers / "index", 3, 0.1)
        before = rows_of(answers)
        assert 0 < len(before) < ROWS
        server.delay = 0
        result, _ = run("regenerate", overrides)
    found = rows_of(answers)
    assert len(found) == ROWS == result["summary"]["rows"]
    assert {name: found[name] for name in before} == before
    assert result["answered_now"] == ROWS - len(before)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_kills_at_random_moments_change_nothing(shop: Workshop) -> None:
    """Real Ray and vLLM, greedily in float32, so that not only the ids are those of an undisturbed run."""
    options = ["generator.part_rows=1", "generator.batch_rows=4", "generator.dtype=float32", "target.sampling.temperature=0"]
    undisturbed, _ = run("regenerate", shop.overrides("regenerate", *options, "target.name=undisturbed"))
    overrides = shop.overrides("regenerate", *options, "target.name=killed_often")
    answers = shop.output / "killed_often" / "jsonl" / "answers"
    dice = random.Random(0)
    starting, working = [(0, dice.random() * 6) for _ in range(5)], [(dice.choice([1, 2, 3]), dice.random() * 0.1) for _ in range(5)]
    moments = dice.sample([*starting, *working], 10)
    interrupted = [killed("regenerate", overrides, answers / "index", parts, seconds) for parts, seconds in moments]
    assert sum(interrupted) >= 8
    assert 0 < len(rows_of(answers)) < ROWS
    run("regenerate", overrides)
    found, expected = rows_of(answers), rows_of(shop.output / "undisturbed" / "jsonl" / "answers")
    assert len(expected) == undisturbed["summary"]["rows"] == ROWS
    assert found.keys() == expected.keys()
    same = sum(found[name] == expected[name] for name in expected)
    assert same == ROWS
