"""What one round of decoding costs at a stated batch and context: drafting in parallel, the sequential head, verification."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoding.propose import propose
from decoding.sampling import RandomStreams
from decoding.settings import SamplingSettings
from decoding.target import TransformersTarget
from decoding.verify import verify_greedy
from drafters.backbone import ContextCache
from drafters.drafter import Drafter

_PIECE = 256  # positions of made-up context appended at a time


@dataclass(frozen=True)
class RoundCost:
    """Seconds of one round of `batch` requests, each with `context` positions before its anchor; medians, at temperature 0.

    Attributes:
        base: drafting without the sequential head: backbone, LM head, one choice for all slots.
        draft: drafting as it is.
        verify: the target's pass over the block and its anchor, its LM head, acceptance.
    """

    batch: int
    context: int
    block_length: int
    base: float
    draft: float
    verify: float

    @property
    def head_overhead(self) -> float:
        """How much longer the head makes a round, as a share of the round without it."""
        return (self.draft - self.base) / (self.base + self.verify)


def round_cost(target: TransformersTarget, drafter: Drafter, batch: int, context: int, repeats: int = 5) -> RoundCost:
    """Time rounds on made-up states: what they hold changes nothing of what is computed.

    Args:
        context: positions before the anchor, at least 1.
        repeats: timed after one that is not.
    """
    base, draft = draft_cost(target, drafter, batch, context, repeats)
    width = drafter.config.block_length
    return RoundCost(batch, context, width, base, draft, verify_cost(target, width, batch, context, repeats))


@torch.inference_mode()
def draft_cost(target: TransformersTarget, drafter: Drafter, batch: int, context: int, repeats: int = 5) -> tuple[float, float]:
    """`base` and `draft` of a RoundCost; arguments as for `round_cost`."""
    width, device = drafter.config.block_length, target.device
    settings, streams = SamplingSettings(), RandomStreams(0, range(batch), device)
    anchor_tokens = torch.ones(batch, dtype=torch.int64, device=device)
    anchors = torch.full((batch,), context, dtype=torch.int64, device=device)
    draft_context = _context(drafter, target, batch, context)

    def draft() -> None:
        propose(drafter, draft_context, anchor_tokens, anchors, width, settings, streams)

    def base() -> None:
        drafter.base_logits(drafter.block_hidden(draft_context, anchor_tokens, anchors)).argmax(-1)

    whole = _seconds(draft, repeats, device)
    return whole if drafter.head is None else _seconds(base, repeats, device), whole


@torch.inference_mode()
def verify_cost(target: TransformersTarget, width: int, batch: int, context: int, repeats: int = 5) -> float:
    """`verify` of a RoundCost for blocks of `width` tokens; with 0 of them, a round of plain decoding."""
    device = target.device
    cache = target.new_cache(batch, context + width + 1)
    tokens = torch.ones(batch, width + 1, dtype=torch.int64, device=device)
    anchors = torch.full((batch,), context, dtype=torch.int64, device=device)
    counts = torch.full((batch,), width, dtype=torch.int64, device=device)

    def verify() -> None:
        # Lengths alone decide what is attended to; the buffers hold zeros.
        cache.truncate(anchors)
        states = target.forward(cache, tokens, counts + 1)
        verify_greedy(tokens[:, 1:], counts, target.logits(states.hidden.flatten(0, 1)).argmax(-1))

    return _seconds(verify, repeats, device)


def _context(drafter: Drafter, target: TransformersTarget, batch: int, length: int) -> ContextCache:
    cache = drafter.new_cache(batch, length)
    width = target.captured_states * target.config.hidden_size
    for start in range(0, length, _PIECE):
        count = min(_PIECE, length - start)
        features = torch.zeros(batch, count, width, dtype=target.dtype, device=target.device)
        counts = torch.full((batch,), count, dtype=torch.int64, device=target.device)
        drafter.extend_context(cache, features, counts, torch.ones(batch, count, dtype=torch.int64, device=target.device))
    return cache


def _seconds(work: Callable[[], None], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(repeats + 1):
        start = _now(device)
        work()
        times.append(_now(device) - start)
    return statistics.median(times[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
