"""Stored hidden states against what the engine computes now: the part of `cache --verify` that reading bytes cannot do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from torch import Tensor

from actors.cluster import death_reason
from actors.engines.base import EngineSettings
from actors.engines.make import make_engine
from actors.engines.vllm import vllm_environment
from actors.errors import ActorError
from drafters.family import family_of
from drafters.target_head import TargetHead
from storage.contract import Contract
from storage.object_store import ObjectStore
from storage.sample import Sample
from storage.shard import Entry, read_sample
from storage.target_files import load_head_weights, read_model_config

# bf16 engines are not bit-stable across batch shapes. A row's plane may differ by this share of its norm; e4m3 adds about 0.03 of its own.
# Other tokens' states, or those of another layer, differ by 1 or so.
TOLERANCE = {"raw": 0.05, "lossless": 0.05, "fp8": 0.08}
LEAST_AGREEMENT = 0.95
"""Share of the target's next tokens (its most probable one) that stored and recomputed last hidden states must agree on."""
NEAR_TIE = 0.1
"""Logits that lie closer than this share of their row's standard deviation may change places by rounding alone."""


@dataclass(frozen=True)
class RowCheck:
    """One row recomputed.

    Attributes:
        error: norm of the difference over the norm, of the worst plane of the row.
        agreeing, predicted: next tokens on which both last hidden states agree, of how many.
    """

    row_id: str
    index: int
    error: float
    agreeing: int
    predicted: int


@dataclass(frozen=True)
class RecheckRecipe:
    """What the actor needs; no tensor among it."""

    cache: ObjectStore
    contract: Contract
    engine: EngineSettings
    cpus: int
    gpus: float


class Rechecker:
    """Holds one engine and the target's head."""

    def __init__(self, recipe: RecheckRecipe) -> None:
        self.recipe = recipe
        self.engine = make_engine(recipe.engine)
        weights, config = load_head_weights(recipe.engine.model), read_model_config(recipe.engine.model)
        rows, hidden = weights.embedding.shape
        dtype = torch.float32 if recipe.engine.dtype == "float32" else torch.bfloat16
        head = TargetHead(rows, hidden, config["rms_norm_eps"], family_of(config), dtype)
        self.head = head.load(weights.embedding, weights.final_norm, weights.lm_head)

    def check(self, rows: Sequence[tuple[str, Entry]]) -> Iterator[RowCheck]:
        """Recompute the samples at (shard, entry), one by one."""
        for shard, entry in rows:
            yield self._check(entry, read_sample(self.recipe.cache, shard, entry, self.recipe.contract))

    @torch.inference_mode()
    def _check(self, entry: Entry, sample: Sample) -> RowCheck:
        (states,) = self.engine.prefill([sample.input_ids.tolist()])
        kept = torch.from_numpy(sample.last_rows).long()
        # Nothing reads the last token's context: a row that was cached in one pass has none, since its engine never read that token.
        ours = [*states.context.float()[:, :-1], states.last_hidden.float()[kept]]
        theirs = [*_floats(sample.context)[:, :-1], _floats(sample.last_hidden)]
        error = max(_relative(a, b) for a, b in zip(ours, theirs, strict=True))
        return RowCheck(entry.row_id, entry.index, error, self._agreeing(ours[-1], theirs[-1]), len(kept))

    def _agreeing(self, ours: Tensor, theirs: Tensor) -> int:
        """Rows [R, H] whose next token is the same, or nearly as probable; some at a time: logits of a long row are gigabytes."""
        agreeing = 0
        for ours_part, theirs_part in zip(ours.split(256), theirs.split(256), strict=True):
            logits, chosen = self.head.logits(ours_part), self.head.logits(theirs_part).argmax(dim=-1, keepdim=True)
            behind = logits.max(dim=-1).values - logits.gather(-1, chosen).squeeze(-1)
            agreeing += int((behind <= NEAR_TIE * logits.std(dim=-1)).sum())
        return agreeing


RecheckActor: Any = ray.remote(max_restarts=0)(Rechecker)


def recheck_rows(recipe: RecheckRecipe, rows: Sequence[tuple[str, Entry]]) -> Iterator[RowCheck]:
    """Recompute rows in an actor that holds the engine, one after the other.

    Raises:
        ActorError: the engine cannot start, or died.
    """
    environment = {"env_vars": vllm_environment(recipe.engine)}
    actor = RecheckActor.options(num_cpus=recipe.cpus, num_gpus=recipe.gpus, runtime_env=environment).remote(recipe)
    try:
        yield from map(ray.get, actor.check.options(num_returns="streaming").remote(list(rows)))
    except RayActorError as error:
        raise ActorError(f"the engine that recomputes rows cannot run: {death_reason(error)}") from error


def recheck_problems(checks: Sequence[RowCheck], codec: str) -> list[str]:
    """What is wrong with recomputed rows, one line each."""
    most = TOLERANCE[codec]
    problems = [
        f"row {check.row_id} (index {check.index}): its stored states differ from the engine's by {check.error:.3f} of their norm, "
        f"more than {most}: they belong to other tokens or to another model"
        for check in checks
        if not check.error <= most
    ]
    agreeing, predicted = sum(check.agreeing for check in checks), sum(check.predicted for check in checks)
    if agreeing < LEAST_AGREEMENT * predicted:
        problems.append(
            f"stored and recomputed last hidden states agree on {agreeing} of {predicted} next tokens, fewer than {LEAST_AGREEMENT:.0%}"
        )
    return problems


def _floats(bits: Any) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).float()


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of what was computed now; 0 for planes without rows."""
    return float((ours - theirs).norm() / ours.norm()) if ours.numel() else 0.0
