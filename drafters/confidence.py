"""The confidence head: how likely is it that the target accepts this slot's token (DSpark paper, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w^T [h_k; W1[prev]] + b); without the Markov feature w^T h_k + b."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.markov = config.confidence_markov
        self.proj = nn.Linear(config.hidden_size + (config.head_rank if self.markov else 0), 1, dtype=dtype)
        nn.init.normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def forward(self, h: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits of c: h [..., H] and, with the Markov feature, W1's rows of the previous tokens [..., r] -> [...]."""
        if not self.markov:
            return self.proj(h).squeeze(-1)
        if embedded is None:
            raise ValueError("this confidence head reads W1's rows of the previous tokens")
        return self.proj(torch.cat([h, embedded], dim=-1)).squeeze(-1)
