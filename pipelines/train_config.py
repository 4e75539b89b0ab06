"""What can be set of a training run, typed and checked: the config of `python -m pipelines.train`."""

from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from actors.train_recipe import DecodeSettings, TrainSettings
from drafters.losses import LossWeights
from pipelines.job import Job, JobError
from pipelines.tracking import TrackingConfig

# For fields that follow others, also where a sweep or a command line changes these: `${times:${drafter.block_length},0.5}`.
OmegaConf.register_new_resolver("if_zero", lambda number, then, other: then if number == 0 else other, replace=True)
OmegaConf.register_new_resolver("times", lambda number, factor: round(number * factor, 6), replace=True)


class DrafterOptions(BaseModel):
    """The drafter's architecture; sizes come from the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    algorithm: str
    layout: str
    num_layers: int
    block_length: int
    head: str
    head_rank: int
    confidence: bool
    confidence_markov: bool
    window: int | None
    rope_theta: float | None = Field(gt=0)
    layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = Field(default=None, ge=1)

    def changes(self) -> dict[str, Any]:
        """What a drafter's configuration is to have other than by default; the draft vocabulary needs the answers."""
        values = self.model_dump(exclude={"draft_vocab_size", "layer_ids"})
        return {name: value for name, value in values.items() if name != "rope_theta" or value is not None}


class LossConfig(BaseModel):
    """See drafters/losses.py for what each term is."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ce: float = Field(ge=0)
    tv: float = Field(ge=0)
    confidence: float = Field(ge=0)
    soft_ce: float = Field(ge=0)
    lk: float = Field(ge=0)
    lk_hybrid: float = Field(ge=0)
    lk_eta: float = Field(ge=0)


class DecodeConfig(BaseModel):
    """See DecodeSettings."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompts: int = Field(ge=1)
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    batch_size: int = Field(ge=1)


class TrainConfig(BaseModel):
    """See TrainSettings; `steps` or `epochs` is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int | None = Field(ge=1)
    epochs: float | None = Field(gt=0)
    global_batch: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    anchors: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    betas: tuple[float, float]
    warmup: float = Field(ge=0, lt=1)
    clip: float = Field(gt=0)
    decay: float = Field(gt=0)
    loss: LossConfig
    head_start: Literal["random", "target"]
    compute: str = Field(pattern="^(bfloat16|float32)$")
    seed: int
    heldout_rows: int = Field(ge=1)
    log_every: int = Field(ge=1)
    score: Literal["teacher_forced", "decoded"]
    score_every: int = Field(ge=1)
    decode: DecodeConfig
    checkpoint_every: int = Field(ge=1)
    prefetch_mib: int = Field(ge=1)
    reader_threads: int = Field(ge=1)
    disk_cache: str
    disk_cache_gib: float = Field(ge=0)
    follow: bool
    follow_patience_minutes: float = Field(gt=0)
    start: str = Field(min_length=1)
    schedule: Literal["cosine", "wsd"]
    cooldown: float = Field(gt=0, le=1)
    ema: float = Field(ge=0, lt=1)
    keep_checkpoints: int = Field(ge=1)
    patience: int | None = Field(ge=1)
    export: Literal["best", "last"]
    stall_minutes: float = Field(gt=0)
    parallel: Literal["ddp", "fsdp"]
    compile: Annotated[Literal["auto", "true", "false"], BeforeValidator(lambda value: str(value).lower())]
    activation_checkpointing: bool
    deterministic: bool

    @property
    def score_metric(self) -> str:
        """The held-out metric that chooses the best checkpoint."""
        return "tau" if self.score == "decoded" else "tau_teacher_forced"

    def settings(self, samples: int | None) -> TrainSettings:
        """With the number of steps worked out for `samples` training samples; None where a growing cache leaves them open.

        Raises:
            JobError: no or both of steps and epochs, a batch larger than the data, or more prompts to decode than there are held-out rows.
        """
        if samples is None and self.steps is None:
            raise JobError(
                "train.follow=true needs train.steps (and train.epochs=null): how long an epoch is shows when the cache is complete"
            )
        if (self.steps is None) == (self.epochs is None):
            raise JobError("give either train.steps or train.epochs, and null for the other")
        if samples is not None and self.global_batch > samples:
            raise JobError(f"train.global_batch={self.global_batch} is more than the {samples} samples there are to train on")
        decode = DecodeSettings(**self.decode.model_dump()) if self.score == "decoded" else None
        if decode is not None and decode.prompts > self.heldout_rows:
            raise JobError(f"train.decode.prompts={decode.prompts} is more than train.heldout_rows={self.heldout_rows}: raise the latter")
        values = self.model_dump(exclude={"epochs", "loss", "steps", "score", "decode", "follow", "follow_patience_minutes"})
        steps = self.steps or max(int(float(self.epochs or 0) * ((samples or 0) // self.global_batch)), 1)
        return TrainSettings(steps=steps, weights=LossWeights(**self.loss.model_dump()), decode=decode, **values)


class WorkersConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    count: int | None = Field(ge=1)
    cpus: int | None = Field(ge=1)
    gpus: float | None = Field(ge=0)


class RunConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str


class TrainJob(Job):
    drafter: DrafterOptions
    train: TrainConfig
    tracking: TrackingConfig
    run: RunConfig
    workers: WorkersConfig
