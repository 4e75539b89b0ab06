"""What a training run is: its settings, and everything its workers need to know."""

from dataclasses import asdict, dataclass
from typing import Any

from drafters.config import DrafterConfig
from drafters.losses import LossWeights
from storage.contract import Contract
from storage.follow import FollowSettings
from storage.object_store import ObjectStore

CHECKPOINTS = "checkpoints"
# What may change between a run's start and its resumption, since it does not change its result.
_NOT_DECISIVE = (
    "log_every", "score_every", "checkpoint_every", "prefetch_mib", "reader_threads", "disk_cache", "disk_cache_gib", "micro_batch"
)  # fmt: skip
FOLLOWS = "follows"
"""In place of a manifest's hash: the run records by itself what it takes from a growing cache."""


@dataclass(frozen=True)
class TrainSettings:
    """How to train. Samples, not tokens, are counted: `global_batch` samples a step over all workers.

    Attributes:
        anchors: blocks drawn from each sample and epoch.
        micro_batch: samples a worker packs into one forward pass; the rest of its share is accumulated.
        decay: slot k counts exp(-k / decay).
        warmup: share of the steps in which the learning rate rises; after them it falls by a cosine to zero.
        head_start: the sequential head starts at `random`, or as the `target`'s own next-token logits after each single token.
        compute: `bfloat16` (products in bf16, weights and optimizer in fp32) or `float32`.
        disk_cache: folder on each node for samples that were read, of at most `disk_cache_gib` GiB; 0 is none.
        heldout_rows: cached samples kept out of training, by hash, to score tau_teacher_forced on.
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


@dataclass(frozen=True)
class TrainRecipe:
    """Everything a worker needs; no tensor among it."""

    cache: ObjectStore
    run: ObjectStore
    contract: Contract
    manifest_hash: str
    model: str
    drafter: DrafterConfig
    settings: TrainSettings
    follow: FollowSettings | None = None


def recipe_facts(recipe: TrainRecipe) -> dict[str, Any]:
    """What decides a run's result; a run folder made with other facts is not continued."""
    return {
        "contract": asdict(recipe.contract),
        "manifest": recipe.manifest_hash,
        "drafter": recipe.drafter.to_dict(),
        "settings": {key: value for key, value in asdict(recipe.settings).items() if key not in _NOT_DECISIVE},
    }
