"""Targets by name in every usual spelling, what is derived where a conf is silent, and configs that compose and say all their mistakes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from drafters.config import DrafterConfig
from pipelines.cache import CacheJob
from pipelines.evaluate import EvaluateJob
from pipelines.job import Job, JobError
from pipelines.plan import PlanJob
from pipelines.prepare import PrepareJob
from pipelines.regenerate import RegenerateJob
from pipelines.sweep_config import SweepJob, grid, trial_config
from pipelines.target import UnknownTarget, as_overrides, default_layer_ids, known_targets, mask_token_id
from pipelines.train_config import TrainJob

CONF = Path(__file__).parent.parent / "conf"
JOBS: dict[str, type[Job]] = {
    "prepare": PrepareJob,
    "regenerate": RegenerateJob,
    "cache": CacheJob,
    "train": TrainJob,
    "evaluate": EvaluateJob,
    "plan": PlanJob,
}
SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "vocab_size": 512, "captured_layers": 5, "mask_token_id": 1, "qk_norm": True, "activation": "silu"
}  # fmt: skip
SWEEPS = ["rank_by_block"]
FROM_A_SWEEP = "from_sweep"  # composes with what a trial was trained with: tests/test_sweep.py
EXPERIMENTS = sorted({path.stem for path in (CONF / "experiment").glob("*.yaml")} - {*SWEEPS, FROM_A_SWEEP})


def names(arguments: list[str]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in as_overrides(arguments))


@pytest.mark.parametrize(
    ("conf", "spellings"),
    [
        ("qwen3_8b", "Qwen3-8B Qwen/Qwen3-8B qwen/qwen3-8b qwen3_8b QWEN3_8B qwen3-8b Qwen3_8B qwen3.8b"),
        ("qwen3_4b", "Qwen3-4B Qwen/Qwen3-4B qwen3_4b"),
        ("qwen3_14b", "Qwen3-14B Qwen/Qwen3-14B qwen3_14b"),
        ("gemma4_12b", "gemma4_12b gemma-4-12b google/gemma-4-12b-it Gemma4-12B gemma-4-12b-it"),
        ("smollm2_135m", "smollm2-135m SmolLM2-135M smollm2_135m SMOLLM2_135M SmolLM2-135M-Instruct"),
    ],
)
def test_every_usual_spelling_of_a_known_target(conf: str, spellings: str) -> None:
    for spelling in spellings.split():
        assert as_overrides([f"target={spelling}"]) == [f"target={conf}"], spelling


def test_spellings_with_spaces() -> None:
    assert as_overrides(["target=Qwen3 8B"]) == ["target=qwen3_8b"]


def test_other_arguments_stay_as_they_are() -> None:
    assert as_overrides(["+experiment=dflash", "target=Qwen3-8B", "target.revision=main"]) == [
        "+experiment=dflash",
        "target=qwen3_8b",
        "target.revision=main",
    ]


def test_a_hub_id_that_no_conf_knows_is_a_custom_target() -> None:
    assert names(["target=HuggingFaceTB/SmolLM3-3B"]) == {
        "target": "custom",
        "target.name": "smollm3-3b",
        "target.model": '"HuggingFaceTB/SmolLM3-3B"',
    }


def test_another_organizations_model_of_the_same_name_is_not_the_known_one() -> None:
    assert names(["target=someone/Qwen3-8B"])["target.model"] == '"someone/Qwen3-8B"'


def test_a_local_folder_that_is_called_like_a_known_target_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for given in (str(folder), "./Qwen3-8B"):
        assert names([f"target={given}"])["target.model"] == f'"{folder}"'
    assert as_overrides(["target=Qwen3-8B"]) == ["target=qwen3_8b"], "a bare name is the conf's"


@pytest.mark.parametrize("name", ["two words", "größe", "it's", 'a "quoted" one', "_under", "comma, colon: {brace}", "back\\slash"])
def test_a_local_folder_of_any_name_reaches_the_config_whole(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    cfg = composed("cache", as_overrides([f"target={folder}"]))
    job = CacheJob.from_config(cfg)
    assert job.target.model == str(folder)
    assert job.places.cache  # the derived name can be part of a key


def test_an_unknown_name_gives_the_nearest_and_the_list() -> None:
    with pytest.raises(UnknownTarget, match=r"there is no target 'qwen3-8c'. Did you mean qwen3_8b") as raised:
        as_overrides(["target=qwen3-8c"])
    for known in known_targets():
        assert known in str(raised.value)
    with pytest.raises(UnknownTarget) as raised:
        as_overrides(["target=/no/such/folder"])
    assert "/no/such/folder" in str(raised.value)
    assert "local folder" in str(raised.value)


def test_default_layers_are_those_of_the_released_drafters() -> None:
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(40) == (1, 10, 19, 28, 37)
    for conf, layers in (("qwen3_4b", 36), ("qwen3_8b", 36), ("qwen3_14b", 40)):
        stated = yaml.safe_load((CONF / "target" / f"{conf}.yaml").read_text())["layer_ids"]
        assert tuple(stated) == default_layer_ids(layers)


@pytest.mark.parametrize("layers", range(2, 90))
def test_default_layers_exist_and_never_name_the_last(layers: int) -> None:
    ids = default_layer_ids(layers)
    assert list(ids) == sorted(set(ids))
    assert all(0 <= layer < layers - 1 for layer in ids)


class Vocabulary:
    """Stands for a chat template: all that the rule asks of it is its tokens."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def vocabulary(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def mask(given: int | str | None, *tokens: str, rows: int) -> int:
    template: Any = Vocabulary(*tokens)
    return mask_token_id(given, template, rows)


def test_mask_token_rule() -> None:
    plain = ("a", "b", "<eos>", "<|reserved_1|>", "<|reserved_0|>")
    assert mask("<eos>", *plain, rows=8) == 2, "the conf's word rules"
    assert mask(1, *plain, rows=8) == 1
    assert mask(None, *plain, rows=8) == 5, "the first row that no token uses"
    assert mask(None, *plain, rows=5) == 3, "else the first reserved token"
    assert mask(None, "a", "<unused7>", rows=2) == 1
    with pytest.raises(UnknownTarget, match=r"target\.mask_token"):
        mask(None, "a", "<pad>", "<eos>", rows=3)  # never pad or eos
    with pytest.raises(UnknownTarget, match="not in the tokenizer's vocabulary"):
        mask("<nope>", *plain, rows=8)
    with pytest.raises(UnknownTarget, match="outside the vocabulary of 8"):
        mask(8, *plain, rows=8)


# Configs


@pytest.fixture(autouse=True)
def conf_folder() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base=None):
        yield
    HydraConfig.instance().cfg = None


def composed(config: str, overrides: list[str]) -> DictConfig:
    cfg = compose(config, overrides=overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)  # `run.name` follows the choice of drafter
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    return cfg


@pytest.mark.parametrize("config", JOBS)
@pytest.mark.parametrize("target", [*known_targets(), "ORG/MODEL"])
def test_every_target_composes_with_every_job(config: str, target: str) -> None:
    job = JOBS[config].from_config(composed(config, as_overrides([f"target={target}"])))
    assert job.target.name == (target if target in known_targets() else "model")


@pytest.mark.parametrize("target", known_targets())
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_for_every_target(experiment: str, target: str) -> None:
    job = TrainJob.from_config(composed("train", [f"target={target}", f"+experiment={experiment}"]))
    assert job.run.name == experiment
    settings = job.train.settings(samples=4096)
    assert settings.steps > 0
    assert (settings.weights.tv > 0) == experiment.startswith("dspark")
    states = {"captured_layers": 1} if experiment == "mtp1" else {}
    shape = DrafterConfig.from_dict({**SHAPE, **states, **job.drafter.changes()})
    assert shape.kind.heads or settings.weights.confidence == 0
    if target != "smollm2_135m":  # the released configs
        assert (settings.learning_rate, settings.global_batch, settings.anchors, job.train.epochs) == (6e-4, 512, 512, 10)
        assert (settings.warmup, settings.clip, settings.weight_decay, settings.schedule) == (0.04, 1.0, 0.0, "cosine")
        assert job.drafter.num_layers == (1 if shape.chain else 5)


@pytest.mark.parametrize("target", known_targets())
@pytest.mark.parametrize("experiment", SWEEPS)
def test_every_sweep_composes_for_every_target(experiment: str, target: str) -> None:
    cfg = composed("sweep", [f"target={target}", f"+experiment={experiment}"])
    job = SweepJob.from_config(cfg)
    assert job.sweep.name == experiment
    points = grid(job.sweep.space)
    assert len(points) == 20
    for point in points:
        trial = TrainJob.from_config(trial_config(cfg, point, "trial"))
        assert {f"drafter.{name}": getattr(trial.drafter, name) for name in ("head_rank", "block_length")} == dict(point.values)
        assert trial.train.decay == pytest.approx(4 / 7 * trial.drafter.block_length)


@pytest.mark.parametrize("config", JOBS)
@pytest.mark.parametrize("overrides", [["storage=s3", "storage.root=s3://bucket/prefix"], ["cluster=existing"]])
def test_other_groups_compose(config: str, overrides: list[str]) -> None:
    JOBS[config].from_config(composed(config, overrides))


def mistakes(config: str, *overrides: str) -> str:
    with pytest.raises(JobError) as raised:
        JOBS[config].from_config(composed(config, list(overrides)))
    return str(raised.value)


@pytest.mark.parametrize("config", JOBS)
def test_unknown_and_ill_typed_values_and_several_at_once_are_named(config: str) -> None:
    told = mistakes(config, "+tarmac=3", "+target.colour=red", "target.sampling.temperature=hot", "corpus.heldout_share=[]")
    for field in ("tarmac", "target.colour", "target.sampling.temperature", "corpus.heldout_share"):
        assert field in told


def test_a_value_that_is_missing_is_named() -> None:
    assert "storage.root" in mistakes("cache", "storage=s3")
    assert "corpus.train" in mistakes("prepare", "corpus=jsonl")


@pytest.mark.parametrize(
    ("config", "override", "field"),
    [
        ("cache", "producer.engine=vlm", "producer.engine"),
        ("cache", "producer.dtype=bf16", "producer.dtype"),
        ("cache", "producer.count=0", "producer.count"),
        ("cache", "cache.codec=zip", "cache.codec"),
        ("cache", "cache.last_hidden_rows=some", "cache.last_hidden_rows"),
        ("cache", "lease.rows=0", "lease.rows"),
        ("regenerate", "generator.actors=0", "generator.actors"),
        ("regenerate", "generator.dtype=half", "generator.dtype"),
        ("regenerate", "generator.max_length=0", "generator.max_length"),
        ("train", "workers.count=0", "workers.count"),
        ("train", "train.learning_rate=-1", "train.learning_rate"),
        ("train", "train.schedule=linear", "train.schedule"),
        ("train", "train.patience=0", "train.patience"),
        ("train", "train.keep_checkpoints=0", "train.keep_checkpoints"),
        ("train", "train.ema=1", "train.ema"),
        ("train", "train.parallel=tensor", "train.parallel"),
        ("train", "train.compile=perhaps", "train.compile"),
        ("evaluate", "evaluate.actors=0", "evaluate.actors"),
        ("evaluate", "evaluate.dtype=float16", "evaluate.dtype"),
        ("prepare", "corpus.heldout_share=1.5", "corpus.heldout_share"),
        ("prepare", "corpus.max_train=0", "corpus.max_train"),
        ("prepare", "show=-1", "show"),
    ],
)
def test_values_that_cannot_work_are_refused_before_anything_starts(config: str, override: str, field: str) -> None:
    assert field in mistakes(config, override)


def test_steps_and_epochs_exclude_each_other() -> None:
    both = TrainJob.from_config(composed("train", ["train.steps=5", "train.epochs=1"]))
    with pytest.raises(JobError, match=r"train.steps or train.epochs"):
        both.train.settings(samples=100)
    large = TrainJob.from_config(composed("train", ["train.global_batch=101"]))
    with pytest.raises(JobError, match="101 is more than the 100 samples"):
        large.train.settings(samples=100)
    epochs = TrainJob.from_config(composed("train", ["train.steps=null", "train.epochs=2.5", "train.global_batch=8"]))
    assert epochs.train.settings(samples=100).steps == 30
