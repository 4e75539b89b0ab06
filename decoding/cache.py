"""A static key/value cache in which every request has its own length."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from decoding.ragged import RaggedRows


class RaggedCache(Cache):
    """Keys and values of a batch of requests of different lengths, in buffers allocated once.

    Row b holds positions [0, lengths[b]). A forward pass writes row b's new positions at lengths[b] onwards; what lies beyond a row's
    length is never attended to and is overwritten later, so taking tokens back is a matter of the length alone.

    Attributes:
        lengths: [B] int64, positions held per request; B shrinks as requests leave.
        max_length: positions a row has room for.
    """

    def __init__(self, batch_size: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.max_length = max_length
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows = batch_size
        self._keys: dict[int, Tensor] = {}  # per layer [rows * max_length, heads, head_dim]: layers may differ in shape
        self._values: dict[int, Tensor] = {}
        self._slots = self.lengths  # where the present pass writes, flat
        self._span = 0  # how many positions the present pass looks at

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def begin(self, positions: Tensor, span: int, ragged: RaggedRows | None = None) -> None:
        """Prepare a forward pass.

        Args:
            positions: [B, Q] where the new keys and values go.
            span: positions [0, span) are handed to attention.
            ragged: which of them a flat pass brings; None: all of them.
        """
        rows = torch.arange(self.batch_size, device=positions.device) * self.max_length
        slots = rows[:, None] + positions
        self._slots = slots.flatten() if ragged is None else ragged.pack(slots)[0]
        self._span = span

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values and return all of them, [B, heads, span, head_dim].

        They come as [B, heads, Q, head_dim], in a flat pass as [1, heads, N, head_dim].
        """
        return self._write(self._keys, layer_idx, key_states), self._write(self._values, layer_idx, value_states)

    def _write(self, buffers: dict[int, Tensor], layer: int, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        buffer = buffers.get(layer)
        if buffer is None:
            # Zeros, not uninitialised memory: a NaN would pass through the mask.
            buffer = buffers[layer] = states.new_zeros(self._rows * self.max_length, heads, width)
        buffer.index_copy_(0, self._slots, states.transpose(1, 2).reshape(-1, heads, width))
        return buffer.view(self._rows, self.max_length, heads, width)[: self.batch_size, : self._span].transpose(1, 2)

    def truncate(self, lengths: Tensor) -> None:
        """Roll back to the given lengths ([B] int64, none longer than now)."""
        self.lengths = lengths.clone()

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep the given rows, in that order. Only rows whose place changes are copied, so keep the others where they are."""
        moved = [(old, new) for new, old in enumerate(rows) if old != new]
        if moved:
            span = int(self.lengths.max())
            source, goal = [old for old, _ in moved], [new for _, new in moved]
            for buffer in (*self._keys.values(), *self._values.values()):
                by_row = buffer.view(self._rows, self.max_length, *buffer.shape[1:])
                by_row[goal, :span] = by_row[source, :span]
        self.lengths = self.lengths[list(rows)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the longest request; only masks and positions of ours are used, which go by `lengths`."""
        return int(self.lengths.max())
