"""Draft a block of tokens for every request of a batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.laps import Laps
from decoding.sampling import Draw, RandomStreams, sample
from decoding.settings import SamplingSettings
from drafters.backbone import ContextCache
from drafters.drafter import Drafter
from drafters.heads import SequentialHead


@dataclass(frozen=True)
class DraftBlock:
    """Draft tokens for the slots after each request's anchor.

    Attributes:
        tokens: [B, w] int64.
        probs: [B, w, V] the distributions they were drawn from; None at temperature 0.
        confidence: [B, w] float64, c_k in (0, 1); None without a confidence head.
    """

    tokens: Tensor
    probs: Tensor | None
    confidence: Tensor | None

    def spread(self, rows: Tensor, batch: int) -> "DraftBlock":
        """The same rows among `batch` requests, at places `rows` ([B] int64); zeros for those that nothing was drafted for."""

        def among(values: Tensor) -> Tensor:
            return values.new_zeros(batch, *values.shape[1:]).index_copy_(0, rows, values)

        return DraftBlock(
            among(self.tokens),
            None if self.probs is None else among(self.probs),
            None if self.confidence is None else among(self.confidence),
        )


@torch.inference_mode()
def propose(
    drafter: Drafter,
    cache: ContextCache,
    anchor_tokens: Tensor,
    anchor_positions: Tensor,
    width: int,
    settings: SamplingSettings,
    streams: RandomStreams,
    lengths: Tensor | None = None,
    laps: Laps | None = None,
) -> DraftBlock:
    """Draft `width` tokens after every request's anchor.

    One backbone pass, then slot by slot through the sequential head, if any; a chain goes slot by slot throughout.

    Args:
        drafter: slot k predicts the token at anchor + k + 1.
        cache: holds the context features of the positions before each anchor.
        anchor_tokens: [B] int64, each request's last committed token.
        anchor_positions: [B] int64, its position.
        width: slots to draft, at most the drafter's block length.
        settings: how tokens are drawn; at temperature 0 the likeliest ones are drafted.
        streams: random numbers of each request's present round.
        lengths: [B] int64 in 1..width, the length of each request's block where it is to be made shorter, rather than cut from a whole one;
            tokens past it mean nothing. In a chain there is no difference.
        laps: books the time of the backbone as "draft" and that of the heads and choices as "head".
    """
    lap = laps.lap if laps else _untimed
    uniforms = None if settings.greedy else streams.uniform(Draw.DRAFT, width)
    if drafter.config.chain:
        chain = drafter.begin_chain(cache, anchor_positions)
        lap("draft")

        def chained(slot: int, previous: Tensor) -> Tensor:
            lap("head")
            hidden = chain.step(previous)
            lap("draft")
            return drafter.base_logits(hidden)

        tokens, probs = _choose_in_sequence(chained, anchor_tokens, width, settings, uniforms)
        lap("head")
        return DraftBlock(tokens, probs, None)
    hidden = drafter.block_hidden(cache, anchor_tokens, anchor_positions, lengths)[:, :width]
    lap("draft")
    logits = drafter.base_logits(hidden)
    if drafter.head is None:
        tokens, probs = _choose(logits, settings, uniforms)
    else:
        tokens, probs = _choose_in_sequence(_biased(drafter.head, hidden, logits), anchor_tokens, width, settings, uniforms)
    confidence = None
    if drafter.confidence is not None:
        previous = torch.cat([anchor_tokens[:, None], tokens[:, :-1]], dim=1)
        confidence = torch.sigmoid(drafter.confidence_logit(hidden, previous).double())
    lap("head")
    return DraftBlock(tokens, probs, confidence)


def _untimed(stage: str) -> float:
    return 0.0


def _choose(logits: Tensor, settings: SamplingSettings, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Choose one token per row of [..., V] logits, and say from which distribution (none where greedy)."""
    if uniforms is None:
        return logits.argmax(-1), None
    probs = settings.probs(logits)
    return sample(probs, uniforms), probs


def _biased(head: SequentialHead, hidden: Tensor, logits: Tensor) -> Callable[[int, Tensor], Tensor]:
    """(slot, previous tokens) -> a slot's logits with the sequential head's bias; to be asked for slot after slot."""
    state = head.begin(len(hidden))

    def at(slot: int, previous: Tensor) -> Tensor:
        nonlocal state
        latent, state = head.step(hidden[:, slot], previous, state)
        return logits[:, slot] + head.bias(latent)

    return at


def _choose_in_sequence(
    logits_at: Callable[[int, Tensor], Tensor], anchor_tokens: Tensor, width: int, settings: SamplingSettings, uniforms: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Choose slot by slot, each slot's logits from the token just chosen (the anchor for the first)."""
    tokens, probs, previous = [], [], anchor_tokens
    for slot in range(width):
        logits = logits_at(slot, previous)
        previous, distribution = _choose(logits, settings, None if uniforms is None else uniforms[:, slot])
        tokens.append(previous)
        probs.append(distribution)
    return torch.stack(tokens, dim=1), None if uniforms is None else torch.stack([p for p in probs if p is not None], dim=1)
