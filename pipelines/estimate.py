"""The arithmetic of `plan`: bytes, hours, network and cost of caching a corpus and training from it. No I/O."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from storage.upkeep import published_bytes

MIB, TB = 2**20, 1e12


class CodecRatio(BaseModel):
    """Encoded bytes over the bytes of bf16, as measured on real rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    context: float = Field(gt=0)
    last_hidden: float = Field(gt=0)


class Plan(BaseModel):
    """What is planned; conf/plan.yaml says what each is and where its default comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rows: int = Field(ge=1)
    mean_tokens: float = Field(gt=0)
    supervised_share: float = Field(gt=0, le=1)
    codecs: dict[str, CodecRatio]
    shard_mib: float = Field(gt=0)
    epochs: float = Field(gt=0)
    producer_tokens_per_second: float = Field(gt=0)
    trainer_tokens_per_second: float = Field(gt=0)
    producers: int = Field(ge=1)
    trainers: int = Field(ge=1)
    gpu_hour_price: float = Field(ge=0)
    tb_month_price: float = Field(ge=0)
    months: float = Field(ge=0)

    @property
    def tokens(self) -> float:
        """Of the whole corpus."""
        return self.rows * self.mean_tokens


@dataclass(frozen=True)
class Size:
    """A cache by one layout. `ratio` is against the published layout's bytes."""

    bytes_per_token: float
    bytes: float
    ratio: float
    shards: int
    write_bytes_per_second: float  # all producers together
    read_bytes_per_second: float  # all trainers together
    storage_cost: float


@dataclass(frozen=True)
class Work:
    """Hours of GPUs, hours on the clock, and producers for each trainer that keep it busy while it follows a growing cache."""

    producer_gpu_hours: float
    producer_hours: float
    trainer_gpu_hours: float
    trainer_hours: float
    producers_per_trainer: float
    producer_cost: float
    trainer_cost: float


def bytes_per_token(plan: Plan, codec: str, layers: int, hidden: int) -> float:
    """Mean bytes a token of this project's layout: context planes for every token, the last hidden state (and its int32 position) only
    where the next token is supervised, int32 ids. Spans, row ids and Arrow's framing are a few hundred bytes a row, and left out."""
    ratio = plan.codecs[codec]
    context = 2 * hidden * layers * ratio.context
    last = plan.supervised_share * (2 * hidden * ratio.last_hidden + 4)
    return context + last + 4


def published_size(plan: Plan, layers: int, hidden: int) -> Size:
    """By DeepSpec's layout."""
    return _size(plan, published_bytes(layers, hidden), layers, hidden)


def size(plan: Plan, codec: str, layers: int, hidden: int) -> Size:
    """By ours."""
    return _size(plan, bytes_per_token(plan, codec, layers, hidden), layers, hidden)


def _size(plan: Plan, each: float, layers: int, hidden: int) -> Size:
    total = each * plan.tokens
    return Size(
        bytes_per_token=each,
        bytes=total,
        ratio=each / published_bytes(layers, hidden),
        shards=int(-(-total // (plan.shard_mib * MIB))),
        write_bytes_per_second=plan.producers * plan.producer_tokens_per_second * each,
        read_bytes_per_second=plan.trainers * plan.trainer_tokens_per_second * each,
        storage_cost=total / TB * plan.tb_month_price * plan.months,
    )


def work(plan: Plan) -> Work:
    """The same for every layout: the network may limit it, see the rates of Size."""
    producing = plan.tokens / plan.producer_tokens_per_second / 3600
    training = plan.epochs * plan.tokens / plan.trainer_tokens_per_second / 3600
    return Work(
        producer_gpu_hours=producing,
        producer_hours=producing / plan.producers,
        trainer_gpu_hours=training,
        trainer_hours=training / plan.trainers,
        producers_per_trainer=plan.trainer_tokens_per_second / plan.producer_tokens_per_second,
        producer_cost=producing * plan.gpu_hour_price,
        trainer_cost=training * plan.gpu_hour_price,
    )
