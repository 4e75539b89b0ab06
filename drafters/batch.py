"""Training samples packed at token level: one flat axis for all sequences, no padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.anchors import block_validity, chain_validity
from drafters.errors import DrafterError


@dataclass(frozen=True)
class SampleTensors:
    """One cached sample: what the target read, and what it thought.

    Attributes:
        input_ids: [T] int64.
        loss_mask: [T] bool.
        context: [L, T, H] the captured layers' residual streams.
        last_hidden: [R, H] last hidden states before the final norm, for the stored rows only.
        last_rows: [R] int64 positions of those rows, ascending.
    """

    input_ids: Tensor
    loss_mask: Tensor
    context: Tensor
    last_hidden: Tensor
    last_rows: Tensor


@dataclass(frozen=True)
class BlockTargets:
    """What the A blocks of a batch are trained on, slot by slot ([A, g] each; entries of invalid slots are clamped, never to be read).

    Attributes:
        labels: token at anchor + k + 1.
        previous: token at anchor + k, which the sequential head conditions on.
        teacher_rows: index into TrainBatch.last_hidden of the state at anchor + k.
        valid: trained, see `anchors.block_validity` and `chain_validity`.
    """

    labels: Tensor
    previous: Tensor
    teacher_rows: Tensor
    valid: Tensor


@dataclass(frozen=True)
class TrainBatch:
    """S packed sequences with A anchors.

    Attributes:
        input_ids: [N_tok] int64.
        loss_mask: [N_tok] bool.
        positions: [N_tok] int64, place in its own sequence.
        offsets: [S + 1] int64, sequence s is [offsets[s], offsets[s + 1]).
        context: [N_tok, L * H], captured layers side by side.
        anchors: [A] int64 flat indices, ascending.
        anchor_sequence: [A] int64, each anchor's sequence.
        last_hidden: [R, H] last hidden states before the final norm.
        teacher_row: [N_tok] int64, row of last_hidden for this position, -1 where none is stored.
    """

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    offsets: Tensor
    context: Tensor
    anchors: Tensor
    anchor_sequence: Tensor
    last_hidden: Tensor
    teacher_row: Tensor

    @property
    def num_anchors(self) -> int:
        return len(self.anchors)

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on another device."""
        return TrainBatch(**{field.name: getattr(self, field.name).to(device) for field in dataclasses.fields(self)})

    def targets(self, block_length: int, chain: bool = False) -> BlockTargets:
        """Labels, previous tokens, teacher rows and validity of every slot.

        Raises:
            DrafterError: where a trained slot has no stored teacher row (the cache was built with another mask).
        """
        steps = torch.arange(block_length, device=self.anchors.device)
        valid = self.validity(block_length, chain)
        last = max(len(self.input_ids) - 1, 0)
        here = (self.anchors[:, None] + steps).clamp(max=last)
        teacher_rows = self.teacher_row[here]
        missing = valid & (teacher_rows < 0)
        if bool(missing.any()):
            anchor, slot = missing.nonzero()[0].tolist()
            raise DrafterError(
                f"sequence {int(self.anchor_sequence[anchor])}: no last hidden state is stored for position "
                f"{int(self.positions[self.anchors[anchor]]) + slot}, though its next token is supervised; "
                "the sample's rows and loss mask disagree"
            )
        return BlockTargets(self.input_ids[(here + 1).clamp(max=last)], self.input_ids[here], teacher_rows.clamp(min=0), valid)

    def validity(self, block_length: int, chain: bool = False) -> Tensor:
        """[A, g] bool, which slots are trained: `anchors.block_validity`, in a chain `anchors.chain_validity`."""
        ends = self.offsets[self.anchor_sequence + 1]
        if chain:
            return chain_validity(self.loss_mask, self.offsets[self.anchor_sequence], ends, self.anchors, block_length)
        return block_validity(self.loss_mask, ends, self.anchors, block_length)


def pack(samples: Sequence[SampleTensors], anchors: Sequence[Tensor]) -> TrainBatch:
    """Put samples side by side on one token axis.

    Args:
        samples: any lengths, same L and H.
        anchors: per sample its anchor positions [A_s] int64 (see `sample_anchors`); may be empty for some.

    Raises:
        DrafterError: no sample, tensors of a sample that disagree, or an anchor that is not a candidate.
    """
    if not samples or len(samples) != len(anchors):
        raise DrafterError(f"pack needs samples and one anchor list for each, got {len(samples)} and {len(anchors)}")
    for index, (sample, chosen) in enumerate(zip(samples, anchors, strict=True)):
        _check_sample(index, sample, chosen, samples[0])
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.tensor([len(sample.last_rows) for sample in samples])
    row_starts = rows.cumsum(0) - rows
    teacher_row = torch.full((int(offsets[-1]),), -1, dtype=torch.int64)
    for s, sample in enumerate(samples):
        teacher_row[offsets[s] + sample.last_rows] = row_starts[s] + torch.arange(len(sample.last_rows))
    return TrainBatch(
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        loss_mask=torch.cat([sample.loss_mask for sample in samples]),
        positions=torch.cat([torch.arange(int(length)) for length in lengths]),
        offsets=offsets,
        context=torch.cat([sample.context.transpose(0, 1).reshape(len(sample.input_ids), -1) for sample in samples]),
        anchors=torch.cat([chosen.sort().values + offsets[s] for s, chosen in enumerate(anchors)]),
        anchor_sequence=torch.repeat_interleave(torch.tensor([len(chosen) for chosen in anchors])),
        last_hidden=torch.cat([sample.last_hidden for sample in samples]),
        teacher_row=teacher_row,
    )


def _check_sample(index: int, sample: SampleTensors, anchors: Tensor, first: SampleTensors) -> None:
    tokens, layers, width = len(sample.input_ids), first.context.shape[0], first.context.shape[2]
    problems = []
    if tuple(sample.loss_mask.shape) != (tokens,) or sample.loss_mask.dtype != torch.bool:
        problems.append(f"loss_mask is {list(sample.loss_mask.shape)} {sample.loss_mask.dtype}, expected [{tokens}] bool")
    if tuple(sample.context.shape) != (layers, tokens, width):
        problems.append(f"context is {list(sample.context.shape)}, expected [{layers}, {tokens}, {width}]")
    if tuple(sample.last_hidden.shape) != (len(sample.last_rows), width):
        problems.append(f"last_hidden is {list(sample.last_hidden.shape)}, expected [{len(sample.last_rows)}, {width}]")
    if len(sample.last_rows) and not 0 <= int(sample.last_rows.min()) <= int(sample.last_rows.max()) < tokens:
        problems.append(f"last_rows reach outside the {tokens} tokens")
    if len(anchors) and not 0 <= int(anchors.min()) <= int(anchors.max()) < tokens - 1:
        problems.append(f"anchors reach outside positions 0..{tokens - 2}")
    elif not problems and len(anchors) and not bool((sample.loss_mask[anchors] & sample.loss_mask[anchors + 1]).all()):
        problems.append("an anchor or its successor is not supervised")
    if problems:
        raise DrafterError(f"sample {index}: " + "; ".join(problems))
