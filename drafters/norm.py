"""RMSNorm, computed in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype but never below float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(nn.Module):
    """Trainable RMSNorm; the weight multiplies as it is (a Gemma target's (1 + w) is folded in when it is initialised from one)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
