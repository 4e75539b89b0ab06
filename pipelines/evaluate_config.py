"""The configuration of an evaluation, typed: see conf/evaluate.yaml and conf/evaluate/ for what each key means."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from actors.decoder import DecoderSettings
from decoding.settings import SamplingSettings
from pipelines.job import Job
from pipelines.machine import decoder_count
from pipelines.tracking import TrackingConfig


class LatencyConfig(BaseModel):
    """What the sequential head costs is measured at this batch, averaged over these context lengths; none: not measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    batch: int = Field(ge=1)
    contexts: tuple[Annotated[int, Field(ge=1)], ...]
    repeats: int = Field(ge=1)


class EvaluateConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    temperature: float = Field(ge=0, le=2)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    max_new_tokens: int = Field(ge=1)
    rows: int | None = Field(ge=1)
    prompts: int | None = Field(ge=1)
    seed: int
    batch_size: int = Field(ge=1)
    actors: int | None = Field(ge=1)
    threads: int | None = Field(ge=1)
    gpus: float | None = Field(ge=0)
    dtype: str = Field(pattern="^(bfloat16|float32)$")
    draft_tokens: int | None = Field(ge=1)
    samples: int = Field(ge=0)
    latency: LatencyConfig

    def sampling(self, stop_ids: tuple[int, ...]) -> SamplingSettings:
        return SamplingSettings(self.temperature, self.max_new_tokens, stop_ids, self.seed, self.top_p, self.top_k)


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else () if value is None else tuple(value)


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class EvaluateJob(Job):
    run: str
    runs: Names
    drafters: Names
    benchmarks: Names
    benchmarks_from: str
    evaluate: EvaluateConfig
    tracking: TrackingConfig

    @property
    def kind(self) -> str:
        """What this evaluation is called among others of the same drafter."""
        return "evaluation" if not self.benchmarks else f"benchmarks-t{self.evaluate.temperature:g}"

    def decoders(self) -> DecoderSettings:
        settings = self.evaluate
        counts = decoder_count(self.cluster, settings.actors, settings.threads, settings.gpus)
        return DecoderSettings(*counts, settings.dtype, settings.batch_size, settings.draft_tokens)
