"""Eagle3 and MTP-1 from a cache to drafted text, as a person runs them, on a tiny random target and a cache written by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_runs import ENVIRONMENT, LAYER_IDS, Here, Workshop, result_of, run, start, write_cache, write_rows
from safetensors.torch import save_file
from test_drafters_released import CASES, checkpoint
from tiny_models import HIDDEN, VOCABULARY, write_tiny_model

from actors.answers import frequent_tokens
from actors.decoder import PLAIN, Decoder, DecoderSettings, Prompt
from corpus.answers import AnsweredRow
from decoding.settings import SamplingSettings
from drafters.released import from_deepspec
from storage.checkpoint import load_drafter
from storage.contract import DraftLayout
from storage.object_store import ObjectStore, StorageSettings

pytestmark = pytest.mark.timeout(900)
CHAINS = {"eagle3": ["drafter.block_length=3"], "mtp1": ["drafter.block_length=1"]}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A target, its prompts, and a cache of every position's last hidden state."""
    shop = Workshop(tmp_path_factory.mktemp("shop"))
    write_tiny_model(shop.folder / "tiny llama", "llama")
    write_rows(shop.folder / "prompts.jsonl", [{"prompt": f"What is {n}?"} for n in range(4)])
    write_rows(shop.folder / "heldout.jsonl", [{"prompt": f"Name {n} colours."} for n in range(2)])
    write_cache(shop, "all")
    return shop


def overrides(shop: Workshop, job: str, name: str, *more: str) -> list[str]:
    """The shop's, for a run of that experiment; what belongs to other heads is left out."""
    given = [given for given in shop.overrides(job, *more) if not given.startswith(("drafter.head_rank", "drafter.block_length", "run"))]
    run_name = [f"run.name={name}", f"+experiment={name}", *CHAINS[name]] if job == "train" else [f"run={name}"]
    return [*given, *run_name]


@pytest.fixture(scope="module")
def trained(shop: Workshop) -> dict[str, dict[str, Any]]:
    """What training both told, side by side."""
    processes = {name: start("train", overrides(shop, "train", name, "tracking=none")) for name in CHAINS}
    results = {}
    for name, process in processes.items():
        output, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors
        results[name] = result_of(output)
    return results


@pytest.mark.parametrize("name", CHAINS)
def test_training_leaves_a_drafter_that_decodes_the_targets_own_text(trained: dict[str, Any], shop: Workshop, name: str) -> None:
    result = trained[name]
    assert result["steps_now"] == 6
    assert result["metrics"]["loss"] > 0
    assert result["metrics"]["heldout/tau_teacher_forced"] >= 1
    assert result["metrics"]["soft_ce" if name == "eagle3" else "ce"] > 0
    folder = ObjectStore(StorageSettings(result["drafter"]))
    block = {"eagle3": 3, "mtp1": 1}[name]
    files = load_drafter(folder)
    assert (files.layout.block_layout, files.layout.block_length) == ("chain", block)
    assert isinstance(files.layout, DraftLayout)
    decoder = Decoder(str(shop.folder / "tiny llama"), {name: folder}, DecoderSettings(1, 1, 0, "float64", 2))
    prompts = [Prompt(number, tuple(range(10 + number, 20 + 2 * number))) for number in range(3)]
    drafted = decoder.decode(prompts, SamplingSettings(max_new_tokens=12), name)
    plain = decoder.decode(prompts, SamplingSettings(max_new_tokens=12), PLAIN)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert {r.drafted for g in drafted for r in g.rounds} >= {block}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_evaluate_decodes_with_it(trained: dict[str, Any], shop: Workshop, name: str) -> None:
    run("prepare", shop.overrides("prepare"))
    result, _ = run("evaluate", overrides(shop, "evaluate", name))
    assert 1 <= result["metrics"][name]["tau"] <= 4
    assert result["differing_texts"] == 0


def test_mtp1_on_a_cache_without_every_last_hidden_state_is_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = Workshop(tmp_path)
    write_tiny_model(shop.folder / "tiny llama", "llama")
    write_cache(shop, "supervised")
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    here = Here(monkeypatch, capsys)
    told = here.refused("train", overrides(shop, "train", "mtp1"))
    for word in ("does not match", "capture.last_hidden_rows", "'supervised'", "mtp1 needs 'all'", "cache.last_hidden_rows=all"):
        assert word in told
    told = here.refused("train", overrides(shop, "train", "eagle3", "drafter.draft_vocab_size=9"))
    assert "answers" in told
    told = here.refused("train", overrides(shop, "train", "eagle3", "train.score=decoded"))
    assert "train.decode.prompts=64 is more than train.heldout_rows=2" in told
    long = ["train.score=decoded", "train.decode.prompts=2", "train.decode.max_new_tokens=900"]
    assert "target's 1024 positions" in here.refused("train", overrides(shop, "train", "eagle3", *long))


def test_fine_tuning_of_a_released_drafter_keeps_its_architecture(shop: Workshop, tmp_path: Path) -> None:
    """Gemma 4's layers, which no option names, on this target; a step of next to no length shows the weights that it began with."""
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "target_layer_ids": list(LAYER_IDS), "mask_token_id": VOCABULARY - 2}
    config = {**CASES["gemma4 dspark"], **sizes, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tensors = {name: tensor.float() for name, tensor in checkpoint(config).items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    options = [f"train.start={tmp_path}", "train.steps=1", "train.learning_rate=1e-30", "drafter.head_rank=6", "run.name=tuned"]
    decoded = ["train.score=decoded", "train.decode.prompts=2", "train.decode.max_new_tokens=8"]
    result, _ = run("train", shop.overrides("train", "tracking=none", *options, *decoded))
    assert 1 <= result["best_tau"] == result["metrics"]["heldout/tau"]
    files, released = load_drafter(ObjectStore(StorageSettings(result["drafter"]))), from_deepspec(config, tensors)
    assert files.config["layer_style"] == "gemma4"
    assert files.config["block_length"] == 3, "what options name is as they say"
    assert files.tensors.keys() == released.state.keys()
    assert all(torch.equal(tensor, released.state[name]) for name, tensor in files.tensors.items())


def test_the_draft_vocabulary_is_what_the_trained_answers_say_most() -> None:
    told = {"a": [7, 7, 7, 3], "b": [3, 5], "held out": [2, 2, 2, 2, 2], "c": [99]}
    answers = [AnsweredRow(name, 0, "test", "chat", np.array([1]), np.array(ids), "stop") for name, ids in told.items()]
    trained = {"a.0", "b.0", "c.0"}
    assert frequent_tokens(answers, trained, (), 3, 10) == (3, 5, 7)
    assert frequent_tokens(answers, trained, (), 5, 10) == (0, 1, 3, 5, 7)  # what was never said follows by id
    assert frequent_tokens(answers, trained, (), 99, 10) == tuple(range(10))
    assert torch.tensor(frequent_tokens(answers, {"none"}, (), 2, 10)).tolist() == [0, 1]
