"""From cached samples to what a drafter trains on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafters.anchors import sample_anchors
from drafters.batch import SampleTensors, TrainBatch, pack
from storage.order import anchor_seed
from storage.sample import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed for one forward pass, and which rows they are."""

    batch: TrainBatch
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Packing:
    """How samples become batches: anchors are drawn by (seed, epoch, row), so that no rank's draw depends on another's.

    Attributes:
        planes: which of a sample's context planes are wanted.
    """

    anchors: int
    seed: int
    device: torch.device
    planes: tuple[int, ...]

    def pack(self, samples: Sequence[Sample], epoch: int) -> MicroBatch:
        tensors = [to_tensors(sample, self.planes) for sample in samples]
        anchors = [
            sample_anchors(tensor.loss_mask, self.anchors, torch.Generator().manual_seed(anchor_seed(self.seed, epoch, sample.row_id)))
            for tensor, sample in zip(tensors, samples, strict=True)
        ]
        return MicroBatch(pack(tensors, anchors).to(self.device), tuple(sample.row_id for sample in samples))

    def split(self, samples: Sequence[Sample], size: int, epoch: int) -> list[MicroBatch]:
        """Micro-batches of `size` samples, the last one of what is left."""
        return [self.pack(samples[start : start + size], epoch) for start in range(0, len(samples), size)]

    def stand_in(self, hidden: int) -> MicroBatch:
        """One block on made-up states: for a rank that has nothing of its own to do while the others exchange slices of the weights."""
        sample = SampleTensors(
            input_ids=torch.zeros(4, dtype=torch.int64),
            loss_mask=torch.ones(4, dtype=torch.bool),
            context=torch.ones(len(self.planes), 4, hidden, dtype=torch.bfloat16),
            last_hidden=torch.ones(4, hidden, dtype=torch.bfloat16),
            last_rows=torch.arange(4),
        )
        return MicroBatch(pack([sample], [torch.tensor([1])]).to(self.device), ())


def tokens_of(samples: Iterable[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def to_tensors(sample: Sample, planes: Sequence[int]) -> SampleTensors:
    """A cached sample as tensors, with the context of the layers at `planes`; bf16 bits are viewed, not converted."""
    every = len(planes) == len(sample.context)
    return SampleTensors(
        input_ids=torch.from_numpy(sample.input_ids.astype(np.int64)),
        loss_mask=torch.from_numpy(sample.loss_mask()),
        context=torch.from_numpy(sample.context if every else sample.context[list(planes)]).view(torch.bfloat16),
        last_hidden=torch.from_numpy(sample.last_hidden).view(torch.bfloat16),
        last_rows=torch.from_numpy(sample.last_rows.astype(np.int64)),
    )
