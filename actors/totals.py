"""Metrics as numerators and denominators, added up over micro-batches, steps and ranks until they are shown."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drafters.drafter import Metrics


class Totals:
    """Sums of one rank."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        for name, (numerator, denominator) in metrics.items():
            pair = torch.stack([numerator.detach(), denominator.detach()]).double().cpu()
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def means(self, device: torch.device) -> dict[str, float]:
        """Each metric over all ranks, the same on all. Every rank must call it: one without any trial still takes part."""
        names = _on_any_rank(self.sums)
        if not names:
            return {}
        table = torch.stack([self.sums.get(name, torch.zeros(2, dtype=torch.float64)) for name in names])
        sum_over_ranks(table, device)
        return {name: (row[0] / row[1]).item() for name, row in zip(names, table, strict=True) if row[1] > 0}


def sum_over_ranks(value: Tensor, device: torch.device) -> Tensor:
    """Add `value` up over the ranks, in place; as it is where there is one rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = value.to(device)  # NCCL knows no tensors in main memory
        dist.all_reduce(shared)
        value.copy_(shared)
    return value


def gathered(items: Iterable[str]) -> list[str]:
    """The items of all ranks, by rank."""
    own = list(items)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return [item for part in parts for item in part]


def _on_any_rank(names: Iterable[str]) -> list[str]:
    """Sorted union over the ranks: one whose share held no anchor has no metrics, and still takes part in the sum."""
    return sorted(set(gathered(names)))
