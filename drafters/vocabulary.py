"""A draft vocabulary smaller than the target's (Eagle3): which target tokens may be drafted, and the head's rows for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.target_head import TargetHead


class DraftVocabulary(nn.Module):
    """Tables between draft ids and target ids; frozen, like the head that they select from, and not part of a checkpoint (the config is).

    Attributes:
        d2t: [D] int64, the target id of each draft id, ascending.
        t2d: [V] int64, the draft id of each target id, -1 where it is never drafted.
        head: [D, H] rows of the target's LM head.
    """

    d2t: Tensor
    t2d: Tensor
    head: Tensor

    def __init__(self, ids: tuple[int, ...], target_head: TargetHead) -> None:
        super().__init__()
        d2t = torch.tensor(ids, dtype=torch.int64, device=target_head.lm_head.device)
        t2d = torch.full((target_head.vocab_size,), -1, dtype=torch.int64, device=d2t.device)
        self.register_buffer("d2t", d2t, persistent=False)
        self.register_buffer("t2d", t2d.index_copy(0, d2t, torch.arange(len(ids), device=d2t.device)), persistent=False)
        self.register_buffer("head", target_head.lm_head[d2t], persistent=False)

    def widen(self, logits: Tensor) -> Tensor:
        """[..., D] -> [..., V], -inf for tokens that are never drafted."""
        wide = logits.new_full((*logits.shape[:-1], len(self.t2d)), float("-inf"))
        return wide.index_copy_(-1, self.d2t, logits)


def make_vocabulary(config: DrafterConfig, target_head: TargetHead) -> DraftVocabulary | None:
    """The draft vocabulary that the configuration names, None for the whole one."""
    return None if config.draft_vocabulary is None else DraftVocabulary(config.draft_vocabulary, target_head)
