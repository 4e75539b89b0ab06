"""Evaluation as a person runs it: drafters side by side on benchmarks, resumed, sharded, released checkpoints; a tiny random target."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_runs import ENVIRONMENT, Here, Workshop, killed, result_of, run, write_rows
from safetensors.torch import save_file
from test_report import Page
from tiny_models import VOCABULARY, write_tiny_model

from actors.decoder import PLAIN, Decoded, Decoder, DecoderSettings, Prompt
from actors.drafter import load_target_head
from actors.errors import ActorError
from corpus.template import ChatTemplate
from decoding.settings import SamplingSettings
from drafters.config import config_from_target
from drafters.drafter import Drafter
from pipelines.outcomes import OutcomeFiles, Work, collect, recorder
from pipelines.prompt_sets import PromptSet
from pipelines.report import EvaluationReport
from pipelines.target import default_layer_ids, mask_token_id
from pipelines.tracking import TrackingConfig, log_table
from storage.checkpoint import DrafterFiles, save_drafter
from storage.contract import Capture, Contract, DraftLayout
from storage.object_store import ObjectStore, StorageSettings
from storage.target_files import read_model_config, target_identity

pytestmark = pytest.mark.timeout(600)
LAYERS = default_layer_ids(8)
DRAFTERS: dict[str, dict[str, Any]] = {
    "spark": {"algorithm": "dspark", "head": "markov", "head_rank": 8, "num_layers": 1, "block_length": 3},
    "flash": {"algorithm": "dflash", "num_layers": 1, "block_length": 3},
    "eagle": {"algorithm": "eagle3", "block_length": 2},
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A target, untrained drafters of it, and a folder with three benchmarks."""
    shop = Workshop(tmp_path_factory.mktemp("shop"))
    write_tiny_model(shop.folder / "tiny llama", "qwen3")
    for name in DRAFTERS:
        write_drafter(shop, name)
    (shop.folder / "benchmarks").mkdir()
    for name, word in (("gsm8k", "How many"), ("humaneval", "Write"), ("mt-bench", "Name")):
        write_rows(shop.folder / "benchmarks" / f"{name}.jsonl", [{"turns": [f"{word} {n} of them?", "And then?"]} for n in range(4)])
    return shop


def write_drafter(shop: Workshop, name: str) -> None:
    model = shop.folder / "tiny llama"
    mask = mask_token_id(None, ChatTemplate(model), VOCABULARY)
    config = config_from_target(read_model_config(model), len(LAYERS), mask_token_id=mask, **DRAFTERS[name])
    torch.manual_seed(len(name))
    drafter = Drafter(config, load_target_head(str(model), "float32"))
    contract = Contract(target_identity(model, str(model)), Capture(LAYERS, 128, "raw"))
    layout = DraftLayout(config.layout, config.block_length, mask)
    store = ObjectStore(StorageSettings(str(shop.stored / "runs" / name / "drafter")))
    save_drafter(store, DrafterFiles(drafter.trainable_state(), config.to_dict(), contract, layout))


def overrides(shop: Workshop, *more: str) -> list[str]:
    given = [given for given in shop.overrides("evaluate") if not given.startswith("run=")]
    return [
        *given,
        "benchmarks=all",
        f"benchmarks_from={shop.folder / 'benchmarks'}",
        "evaluate.rows=2",
        *more,
    ]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    for name, value in {**ENVIRONMENT, "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    return Here(monkeypatch, capsys)


@pytest.fixture(scope="module")
def compared(shop: Workshop) -> dict[str, Any]:
    latency = ["evaluate.latency.contexts=[8,20]", "evaluate.latency.batch=2", "evaluate.latency.repeats=1"]
    return run("evaluate", overrides(shop, "runs=[spark,flash,none]", *latency))[0]


def test_benchmarks_with_several_drafters_side_by_side(compared: dict[str, Any]) -> None:
    assert {name: part["rows"] for name, part in compared["sets"].items()} == {"gsm8k": 2, "humaneval": 2, "mt-bench": 2}
    assert compared["differing_texts"] == 0, "float32 at temperature 0: the target's own text"
    assert list(compared["metrics"]) == ["spark", "flash", PLAIN]
    assert compared["metrics"][PLAIN]["tau"] == compared["metrics"][PLAIN]["tau_macro"] == 1
    rows = {(row["drafter"], row["set"]): row for row in compared["rows"]}
    for name in ("spark", "flash"):
        macro = sum(rows[name, part]["tau"] for part in compared["sets"]) / 3
        assert rows[name, "macro"]["tau"] == pytest.approx(macro) == compared["metrics"][name]["tau_macro"]
        assert rows[name, "domain:math"]["tau"] == rows[name, "gsm8k"]["tau"]
        assert rows[name, "gsm8k"]["wall_clock_ratio"] > 0
    assert {cost["drafter"] for cost in compared["head_costs"]} == {"spark", "flash"}
    assert next(cost for cost in compared["head_costs"] if cost["drafter"] == "flash")["overhead"] == 0
    for name in ("spark", "flash"):
        profile = compared["round_profile"][name]
        stages = ("draft", "head", "verify", "outside")
        assert sum(profile[f"{stage}_share"] for stage in stages) == pytest.approx(1)
        assert min(profile[f"{stage}_ms"] for stage in stages) > 0
    folder = Path(compared["report"]).parent
    page = Page((folder / "report.html").read_text())
    for words in (
        "spark over flash",
        "humaneval",
        "Acceptance by domain",
        "Confidence threshold",
        "rejected",
        "Where the time of a round goes",
    ):
        assert words in page.text
    assert "| spark" in (folder / "report.md").read_text()
    assert EvaluationReport.from_dict(json.loads((folder / "report.json").read_text())).drafters[0].name == "spark"
    assert {file.suffix for file in (folder / "figures").iterdir()} == {".png", ".svg"}


def test_what_is_decoded_is_not_decoded_again(compared: dict[str, Any], shop: Workshop, here: Here) -> None:
    code, output, errors = here.run("evaluate", overrides(shop, "runs=[flash,none]"))
    assert code == 0, errors
    again = result_of(output)
    assert again["recorded"]
    assert again["counts"]["flash"] == compared["counts"]["flash"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["runs=[spark,spark]"], "named twice"),
        (["runs=[absent]"], "python -m pipelines.train"),
        (["run=spark", "benchmarks=[gsm9k]"], "unknown benchmark 'gsm9k'"),
        (["run=spark", "benchmarks=[aime25]"], "aime25.jsonl"),
        (["run=spark", "evaluate.max_new_tokens=1020"], "prompt 1 of gsm8k"),
        (["run=spark", "evaluate.top_p=0"], "evaluate.top_p=0"),
        (["drafters=[/no/such/folder]"], "/no/such/folder"),
    ],
)
def test_mistakes_are_told_before_anything_starts(shop: Workshop, here: Here, more: list[str], words: str) -> None:
    assert words in here.refused("evaluate", overrides(shop, *more), shop.stored)


# Groups, files, restarts


def small_sets() -> tuple[PromptSet, ...]:
    def part(name: str, count: int) -> PromptSet:
        prompts = tuple(Prompt(10 * len(name) + n, tuple(range(7 + n, 15 + 2 * n))) for n in range(count))
        return PromptSet(name, "made up", (None,) * count, prompts)  # type: ignore[arg-type]

    return part("a", 5), part("bcd", 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_evaluation_goes_on_to_the_same_texts(shop: Workshop, tmp_path: Path, temperature: float) -> None:
    names = {name: ObjectStore(StorageSettings(str(shop.stored / "runs" / name / "drafter"))) for name in ("spark", "eagle")}
    sampling = SamplingSettings(temperature, 9, (), 3, top_p=0.95)
    decoder = Decoder(str(shop.folder / "tiny llama"), names, DecoderSettings(1, 1, 0, "float32", 2))
    sets = small_sets()
    everyone = (*names, PLAIN)

    def texts(folder: Path, interrupted: bool) -> dict[str, list[list[int]]]:
        files = OutcomeFiles(folder, {name: f"key of {name}" for name in everyone}, 1)
        passes = 0
        while (work := Work.plan(sets, everyone, 2, files)).groups:
            passes += 1
            order = list(range(len(work.groups)))[:: -1 if interrupted else 1]
            for index in order[:2] if interrupted else order:  # killed after two groups
                recorder(work, files, lambda count: None)(index, decoder.decode_group(work.groups[index], sampling))
            if interrupted and passes == 1:
                next((folder / "key of spark").iterdir()).write_text("{torn")
        assert passes == (3 if interrupted else 1)
        found = collect(sets, everyone, 2, files)
        assert all(len(found[name][part.name]) == len(part.prompts) for name in everyone for part in sets)
        return {name: [o.drafted.tokens for part in sets for o in found[name][part.name]] for name in everyone}

    whole = texts(tmp_path / "whole", interrupted=False)
    assert texts(tmp_path / "killed", interrupted=True) == whole
    assert whole["spark"] == whole[PLAIN] if temperature == 0 else whole["spark"] != whole["eagle"]


def test_what_is_read_is_what_was_written(tmp_path: Path, shop: Workshop) -> None:
    store = ObjectStore(StorageSettings(str(shop.stored / "runs" / "spark" / "drafter")))
    decoder = Decoder(str(shop.folder / "tiny llama"), {"spark": store}, DecoderSettings(1, 1, 0, "float32", 2))
    sets = small_sets()[:1]
    files = OutcomeFiles(tmp_path, {"spark": "k"}, 1)
    work = Work.plan(sets, ("spark",), 2, files)
    assert work.decodings == 10
    made: dict[int, list[Decoded]] = {}
    for index, group in enumerate(work.groups):
        results = decoder.decode_group(group, SamplingSettings(0.0, 6))
        made[index] = results["spark"]
        recorder(work, files, lambda count: None)(index, results)
    assert collect(sets, ("spark",), 2, files)["spark"]["a"] == [outcome for index in sorted(made) for outcome in made[index]]


def test_a_round_is_timed_with_and_without_the_head(shop: Workshop) -> None:
    for name in DRAFTERS:
        store = ObjectStore(StorageSettings(str(shop.stored / "runs" / name / "drafter")))
        decoder = Decoder(str(shop.folder / "tiny llama"), {name: store}, DecoderSettings(1, 1, 0, "float32", 2))
        cost = decoder.round_cost(name, batch=2, context=5, repeats=1)
        assert (cost.batch, cost.context, cost.block_length) == (2, 5, DRAFTERS[name]["block_length"])
        assert min(cost.base, cost.draft, cost.verify) > 0
        assert (cost.base == cost.draft) == (name != "spark")
        assert cost.head_overhead == pytest.approx((cost.draft - cost.base) / (cost.base + cost.verify))


class PoolHere:
    """A decoder pool without Ray."""

    def __init__(self, model: str, drafters: Any, settings: DecoderSettings, groups: int) -> None:
        self.decoder = Decoder(model, drafters, settings)

    def decode(self, groups: Any, sampling: SamplingSettings, on_group: Any) -> None:
        for index, group in enumerate(groups):
            on_group(index, self.decoder.decode_group(group, sampling))


def test_heldout_prompts_of_a_corpus(shop: Workshop, here: Here) -> None:
    write_rows(shop.folder / "prompts.jsonl", [{"prompt": f"What is {n}?"} for n in range(4)])
    write_rows(shop.folder / "heldout.jsonl", [{"prompt": f"Name {n} colours."} for n in range(3)])
    here.patch.setattr("pipelines.evaluate.DecoderPool", PoolHere)
    here.patch.setattr("pipelines.evaluate.cluster", lambda settings: nullcontext())
    assert here.run("prepare", shop.overrides("prepare"))[0] == 0
    more = ["run=eagle", "evaluate.batch_size=2", "evaluate.temperature=1", "evaluate.top_k=9", "evaluate.prompts=2"]
    code, output, errors = here.run("evaluate", shop.overrides("evaluate", *more))
    assert code == 0, errors
    result = result_of(output)
    assert {name: part["rows"] for name, part in result["sets"].items()} == {"held-out": 2}
    assert 1 <= result["metrics"]["eagle"]["tau"] == result["metrics"]["eagle"]["tau_macro"] <= 3
    assert result["settings"]["top_k"] == 9
    page = Path(result["report"])
    assert page == shop.stored / "runs" / "eagle" / "evaluation" / "report.html"
    assert "held-out prompts" in page.read_text()
    assert page.with_name("report.png").read_bytes().startswith(b"\x89PNG")


def test_fewer_draft_tokens_than_a_block(shop: Workshop, here: Here) -> None:
    here.patch.setattr("pipelines.evaluate.DecoderPool", PoolHere)
    here.patch.setattr("pipelines.evaluate.cluster", lambda settings: nullcontext())
    code, output, errors = here.run("evaluate", overrides(shop, "run=spark", "evaluate.draft_tokens=2", "evaluate.max_new_tokens=8"))
    assert code == 0, errors
    result = result_of(output)
    assert result["differing_texts"] == 0
    assert "accept_prefix@2" in result["metrics"]["spark"]
    assert "accept_prefix@3" not in result["metrics"]["spark"]
    assert "At most 2 tokens are drafted" in Path(result["report"]).read_text()


class KilledAfterTwo(PoolHere):
    """Dies in the middle of its work."""

    def decode(self, groups: Any, sampling: SamplingSettings, on_group: Any) -> None:
        super().decode(groups[:2], sampling, on_group)
        raise ActorError("a decoder died")


def test_an_evaluation_that_died_decodes_only_what_is_left(shop: Workshop, here: Here, tmp_path: Path) -> None:
    here.patch.setattr("pipelines.evaluate.cluster", lambda settings: nullcontext())
    given = overrides(shop, "run=flash", f"output={tmp_path}", f"storage.root={shop.output}", "evaluate.max_new_tokens=7")
    here.patch.setattr("pipelines.evaluate.DecoderPool", KilledAfterTwo)
    code, output, errors = here.run("evaluate", given)
    assert (code, "a decoder died" in errors, "result:" in output) == (2, True, False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("decoded/*/*.json")}
    assert len(before) == 2
    here.patch.setattr("pipelines.evaluate.DecoderPool", PoolHere)
    code, output, errors = here.run("evaluate", given)
    assert code == 0, errors
    assert len(list(tmp_path.rglob("decoded/*/*.json"))) == sum(part["rows"] for part in result_of(output)["sets"].values()) == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before


# Slow: more processes


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_evaluation_killed_at_any_moment_ends_in_the_same_results(shop: Workshop, tmp_path: Path) -> None:
    """Real Ray, killed with -9 and all its processes while it starts, decodes and writes; figures but for times as if undisturbed."""
    more = ["runs=[spark,eagle]", "evaluate.temperature=1", "evaluate.rows=4", "evaluate.max_new_tokens=40", f"storage.root={shop.output}"]
    whole, _ = run("evaluate", overrides(shop, *more, f"output={tmp_path / 'whole'}"))
    folder = tmp_path / "killed" / "tiny_llama" / "decoded"
    given = overrides(shop, *more, f"output={tmp_path / 'killed'}")
    moments = [(0, 4.0), (1, 0.0), (2, 0.02), (3, 0.1), (5, 0.0)]
    interrupted = [killed("evaluate", given, folder, files, seconds) for files, seconds in moments]
    assert sum(interrupted) >= 4, interrupted
    kept = {path: path.read_bytes() for path in folder.glob("*/*.json")}
    again, _ = run("evaluate", given)
    assert {path: path.read_bytes() for path in kept} == kept, "what is decoded is not decoded again"
    assert 0 < len(kept) < len(list(folder.glob("*/*.json"))) == 2 * sum(part["rows"] for part in whole["sets"].values())
    assert again["counts"] == whole["counts"]
    assert again["metrics"] == whole["metrics"]
    timed = ("wall_clock_ratio", "seconds")
    rows = [[{k: v for k, v in row.items() if not k.endswith(timed)} for row in result["rows"]] for result in (again, whole)]
    assert rows[0] == rows[1]
    assert again["gains"] == whole["gains"]
    assert texts_of(tmp_path / "killed") == texts_of(tmp_path / "whole")


def texts_of(folder: Path) -> dict[str, list[list[int]]]:
    files = {f"{path.parent.name}/{path.name}": json.loads(path.read_text()) for path in folder.rglob("decoded/*/*.json")}
    return {name: [drafted["tokens"] for drafted, _, _ in found["outcomes"]] for name, found in files.items()}


@pytest.mark.slow
def test_two_workers_decode_what_one_does(shop: Workshop, tmp_path: Path) -> None:
    results = []
    for workers in (1, 2):
        drafters = [f"output={tmp_path / str(workers)}", f"storage.root={shop.output}"]
        more = ["run=spark", "evaluate.temperature=1", f"evaluate.actors={workers}", f"cluster.cpus={workers}"]
        result, _ = run("evaluate", overrides(shop, *drafters, *more))
        results.append(result)
        results[-1]["texts"] = texts_of(tmp_path / str(workers))
    assert results[0]["counts"] == results[1]["counts"]
    assert results[0]["texts"] == results[1]["texts"]
    assert len(results[0]["texts"]) == 6


@pytest.mark.slow
def test_a_released_checkpoint_decodes_by_its_folder(shop: Workshop, tmp_path: Path) -> None:
    released = write_released(shop, tmp_path / "dspark_tiny_block3")
    result, _ = run("evaluate", overrides(shop, f"drafter={released}", "runs=[none]"))
    assert list(result["metrics"]) == ["dspark_tiny_block3", PLAIN]
    assert result["differing_texts"] == 0
    assert result["metrics"]["dspark_tiny_block3"]["tau"] >= 1


def test_a_released_checkpoint_of_another_target_is_refused(shop: Workshop, tmp_path: Path, here: Here) -> None:
    released = write_released(shop, tmp_path / "released", change=1.0)
    told = here.refused("evaluate", overrides(shop, f"drafters=[{released}]"), shop.stored)
    assert "belongs to another target" in told


def test_a_released_checkpoint_decodes_the_targets_own_text(shop: Workshop, tmp_path: Path) -> None:
    store = ObjectStore(StorageSettings(str(write_released(shop, tmp_path / "released"))))
    decoder = Decoder(str(shop.folder / "tiny llama"), {"released": store}, DecoderSettings(1, 1, 0, "float64", 2))
    prompts = small_sets()[0].prompts
    drafted, plain = (decoder.decode(prompts, SamplingSettings(0.0, 12), name) for name in ("released", PLAIN))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert max(r.drafted for g in drafted for r in g.rounds) == 3
    assert all(len(r.confidence) == r.drafted for g in drafted for r in g.rounds)


def write_released(shop: Workshop, folder: Path, change: float = 0.0) -> Path:
    """A random checkpoint in DeepSpec's format, with the target's embedding and head as such a checkpoint has them."""
    model = read_model_config(shop.folder / "tiny llama")
    hidden, heads, d, rank = model["hidden_size"], model["num_attention_heads"], model["head_dim"], 8
    config = {
        **model,
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "block_size": 3,
        "mask_token_id": 4,
        "target_layer_ids": [1, 3, 5],
        "num_anchors": 4,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    kv = model["num_key_value_heads"] * d
    shapes = {
        "fc": (hidden, 3 * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (heads * d, hidden),
        "layers.0.self_attn.k_proj": (kv, hidden),
        "layers.0.self_attn.v_proj": (kv, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * d),
        "layers.0.self_attn.q_norm": (d,),
        "layers.0.self_attn.k_norm": (d,),
        "layers.0.mlp.gate_proj": (model["intermediate_size"], hidden),
        "layers.0.mlp.up_proj": (model["intermediate_size"], hidden),
        "layers.0.mlp.down_proj": (hidden, model["intermediate_size"]),
        "markov_head.markov_w1": (VOCABULARY, rank),
        "markov_head.markov_w2": (VOCABULARY, rank),
        "confidence_head.proj": (1, hidden + rank),
    }
    torch.manual_seed(4)
    tensors = {f"{name}.weight": torch.randn(shape) * 0.1 + (1.0 if "norm" in name else 0.0) for name, shape in shapes.items()}
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    head = load_target_head(str(shop.folder / "tiny llama"), "float32")
    tensors |= {"embed_tokens.weight": head.embedding.clone() + change, "lm_head.weight": head.lm_head.clone()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_rows_go_to_a_wandb_table(tmp_path: Path) -> None:
    config = TrackingConfig(enabled=True, project="test", mode="offline")
    log_table(config, "spark drafting", tmp_path, "evaluation", ("drafter", "tau"), [{"drafter": "spark", "tau": 1.5}], "a note")
    (run_folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (table,) = run_folder.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["spark", 1.5]]
