"""How long conversations are, in tokens of the target.

A conversation's length is that of its messages' texts and thoughts; what the chat template writes around them is not counted, since it
is another for each target and every answer adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from corpus.conversation import Conversation
from corpus.template import ChatTemplate

_BATCH = 512


def token_lengths(
    conversations: Sequence[Conversation], template: ChatTemplate, watch: Callable[[int], None] = lambda rows: None
) -> dict[str, int]:
    """Tokens by conversation id; `watch` is told how many conversations are counted."""
    lengths: dict[str, int] = {}
    for start in range(0, len(conversations), _BATCH):
        batch = conversations[start : start + _BATCH]
        texts = [(row.id, text) for row in batch for message in row.messages for text in (message.content, message.reasoning) if text]
        lengths.update((row.id, 0) for row in batch)
        for (row_id, _), count in zip(texts, template.count_tokens([text for _, text in texts]), strict=True):
            lengths[row_id] += count
        watch(len(lengths))
    return lengths


def histogram(lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """(from, to, rows) in powers of two, both ends included, from the shortest to the longest; empty bins in between are listed."""
    bins: dict[int, int] = {}
    for length in lengths:
        bins[length.bit_length()] = bins.get(length.bit_length(), 0) + 1
    if not bins:
        return []
    return [((1 << bits) >> 1, (1 << bits) - 1, bins.get(bits, 0)) for bits in range(min(bins), max(bins) + 1)]
