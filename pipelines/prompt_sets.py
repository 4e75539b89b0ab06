"""What an evaluation decodes: a corpus's held-out prompts, or benchmarks; the first turn of each, as the target reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.decoder import Prompt
from corpus.benchmarks import MINI, BenchmarkRows, load_benchmarks
from corpus.conversation import Conversation
from pipelines.job import JobError
from pipelines.target import Target
from storage.target_files import read_model_config

HELDOUT = "held-out"


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are reported together.

    Attributes:
        name: `gsm8k`, or `gsm8k-mini` where the bundled mini set stands in, or HELDOUT.
        origin: where they come from, for the report.
        conversations, prompts: side by side.
    """

    name: str
    origin: str
    conversations: tuple[Conversation, ...]
    prompts: tuple[Prompt, ...]

    @property
    def domain(self) -> str:
        """The domain of its prompts, `mixed` where they have several."""
        domains = {conversation.domain for conversation in self.conversations}
        return domains.pop() if len(domains) == 1 else "mixed"


def heldout_set(conversations: Sequence[Conversation], corpus: str, target: Target, max_new_tokens: int) -> PromptSet:
    """Held-out prompts of a corpus, in the order of their ids."""
    ordered = sorted(conversations, key=lambda conversation: conversation.id)
    return _set(HELDOUT, f"corpus {corpus}", ordered, target, max_new_tokens)


def benchmark_sets(place: str, names: Sequence[str] | None, rows: int | None, target: Target, max_new_tokens: int) -> tuple[PromptSet, ...]:
    """Benchmarks from the hub, a folder, or the bundled mini set.

    Args:
        names: None for all there are.
        rows: of each at most; None for the published protocol's numbers.

    Raises:
        CorpusError: see `load_benchmarks`.
        JobError: a prompt that leaves no room for `max_new_tokens`.
    """
    return tuple(_benchmark(found, target, max_new_tokens) for found in load_benchmarks(place, names, rows))


def mini_note(sets: Sequence[PromptSet]) -> tuple[str, ...]:
    """What must be said where mini sets stand in."""
    named = [part.name for part in sets if part.origin == MINI]
    if not named:
        return ()
    return (
        f"{', '.join(named)}: a few rows written for this project in the manner of each set. No figure on them is one on the real set.",
    )


def _benchmark(rows: BenchmarkRows, target: Target, max_new_tokens: int) -> PromptSet:
    return _set(rows.label, rows.origin, rows.conversations, target, max_new_tokens)


def _set(name: str, origin: str, conversations: Sequence[Conversation], target: Target, max_new_tokens: int) -> PromptSet:
    room = read_model_config(target.folder).get("max_position_embeddings")
    prompts = []
    for number, conversation in enumerate(conversations, 1):
        ids = tuple(target.template.prompt_ids(conversation.rounds()[0], target.config.enable_thinking))
        if room is not None and len(ids) + max_new_tokens > room:
            raise JobError(
                f"prompt {number} of {name} has {len(ids)} tokens; with evaluate.max_new_tokens={max_new_tokens} it exceeds the target's "
                f"{room} positions. Lower evaluate.max_new_tokens."
            )
        prompts.append(Prompt(int(conversation.id[:12], 16), ids))
    return PromptSet(name, origin, tuple(conversations), tuple(prompts))
