"""What a training run is: its settings, and everything its workers need to know."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from drafters.config import DrafterConfig
from drafters.losses import LossWeights
from storage.contract import Contract
from storage.follow import FollowSettings
from storage.object_store import ObjectStore

CHECKPOINTS = "checkpoints"
# What may change between a run's start and its resumption, since it does not change its result.
_NOT_DECISIVE = (
    "log_every", "score_every", "checkpoint_every", "prefetch_mib", "reader_threads", "disk_cache", "disk_cache_gib", "micro_batch",
    "keep_checkpoints", "patience", "export", "stall_minutes", "parallel", "compile", "activation_checkpointing", "deterministic"
)  # fmt: skip
RANDOM, TARGET_LAYERS = "random", "target_layers"
"""Values of `start` other than a folder."""
FOLLOWS = "follows"
"""In place of a manifest's hash: the run records by itself what it takes from a growing cache."""


@dataclass(frozen=True)
class DecodeSettings:
    """How held-out prompts are decoded at every scoring: the first `prompts` of them, `batch_size` at a time."""

    prompts: int
    max_new_tokens: int
    temperature: float
    batch_size: int


@dataclass(frozen=True)
class TrainSettings:
    """How to train. Samples, not tokens, are counted: `global_batch` samples a step over all workers.

    Attributes:
        anchors: blocks drawn from each sample and epoch.
        micro_batch: samples a worker packs into one forward pass; the rest of its share is accumulated.
        decay: slot k counts exp(-k / decay).
        warmup: share of the steps in which the learning rate rises; what comes after them `schedule` says (see optimization.schedule).
        cooldown: share of the steps in which the schedule `wsd` falls.
        head_start: the sequential head starts at `random`, or as the `target`'s own next-token logits after each single token.
        compute: `bfloat16` (products in bf16, weights and optimizer in fp32) or `float32`.
        disk_cache: folder on each node for samples that were read, of at most `disk_cache_gib` GiB; 0 is none.
        heldout_rows: cached samples kept out of training, by hash, to score on.
        decode: decode held-out prompts besides, and choose by their `tau`; None chooses by tau_teacher_forced.
        start: `random`, `target_layers` (the target's own last layers), or the folder of a drafter to go on from.
        ema: share of the weights' running average that a step keeps; 0 for none. The average is what is scored and exported.
        keep_checkpoints: how many of the newest checkpoints stay; the best one stays besides.
        patience: scorings in a row without a better one after which training ends; None for never.
        export: which checkpoint becomes the drafter, `best` by the held-out score or `last`.
        stall_minutes: how long to wait for one sample before the run ends with the cause.
        parallel: `ddp` (every worker holds all weights and optimizer state) or `fsdp` (each holds a slice).
        compile: `auto` (on CUDA), `true` or `false`: torch.compile of the layers' feed-forward parts.
        activation_checkpointing: work the layers' activations out again in the backward, rather than keep them.
        deterministic: only kernels whose results do not depend on the order of threads.
    """

    steps: int
    global_batch: int
    micro_batch: int
    anchors: int
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    warmup: float
    clip: float
    decay: float
    weights: LossWeights
    head_start: str
    compute: str
    seed: int
    heldout_rows: int
    log_every: int
    score_every: int
    checkpoint_every: int
    prefetch_mib: int
    reader_threads: int
    disk_cache: str = ""
    disk_cache_gib: float = 0.0
    start: str = RANDOM
    schedule: str = "cosine"
    cooldown: float = 0.2
    ema: float = 0.0
    keep_checkpoints: int = 2
    patience: int | None = None
    export: str = "best"
    stall_minutes: float = 15.0
    parallel: str = "ddp"
    compile: str = "auto"
    activation_checkpointing: bool = False
    deterministic: bool = False
    decode: DecodeSettings | None = None

    @property
    def score(self) -> str:
        """The held-out metric that chooses the best checkpoint."""
        return "tau_teacher_forced" if self.decode is None else "tau"


@dataclass(frozen=True)
class TrainRecipe:
    """Everything a worker needs; no tensor among it.

    Attributes:
        start: folder of the drafter to go on from, if there is one.
        layers: those of the cached layers that the drafter reads; None for all.
    """

    cache: ObjectStore
    run: ObjectStore
    contract: Contract
    manifest_hash: str
    model: str
    drafter: DrafterConfig
    settings: TrainSettings
    follow: FollowSettings | None = None
    start: ObjectStore | None = None
    layers: tuple[int, ...] | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Target layers that the drafter reads."""
        return self.contract.capture.layer_ids if self.layers is None else self.layers

    @property
    def drafter_contract(self) -> Contract:
        """What the drafter was trained on: the cache's contract, with the layers that it reads."""
        return replace(self.contract, capture=replace(self.contract.capture, layer_ids=self.layer_ids))


def recipe_facts(recipe: TrainRecipe) -> dict[str, Any]:
    """What decides a run's result; a run folder made with other facts is not continued."""
    settings = {key: value for key, value in asdict(recipe.settings).items() if key not in _NOT_DECISIVE}
    return {
        "contract": asdict(recipe.contract),
        "manifest": recipe.manifest_hash,
        "drafter": recipe.drafter.to_dict(),
        "settings": {key: value for key, value in settings.items() if value is not None},  # what nobody asked for decides nothing
        **({} if recipe.layers is None else {"layers": recipe.layers}),
    }
