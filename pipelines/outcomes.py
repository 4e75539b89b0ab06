"""What was decoded, kept in files: one for each group of prompts and drafter, written when the group is done.

A killed evaluation therefore goes on where it was, and another one that shares a drafter, prompts and settings decodes nothing twice. A
file holds drafted and plain decoding together, from one session on one machine, so that their times can be compared.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.decoder import PLAIN, Decoded, Group, Prompt
from decoding.settings import Generation, Round, SamplingSettings, Seconds
from pipelines.job import write_json
from pipelines.prompt_sets import PromptSet
from storage.contract import TargetIdentity

FORMAT = 3
"""Of the files; another number makes old ones be passed over."""
Outcomes = dict[str, dict[str, list[Decoded]]]
"""By drafter, then by prompt set, in the order of its prompts."""


def drafter_key(target: TargetIdentity, tensors: Mapping[str, Tensor], config: Any, sampling: SamplingSettings, how: Any) -> str:
    """Changes with everything that decides what is decoded, or how long it takes on one machine.

    Args:
        config: of the drafter, its captured layers included; None for plain decoding.
        how: dtype and batch size.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps([FORMAT, asdict(target), config, asdict(sampling), how], sort_keys=True, default=str).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class OutcomeFiles:
    """The files of one evaluation, below `folder`.

    Attributes:
        keys: of each drafter, see `drafter_key`.
        threads: of each decoder; noted with what was decoded.
    """

    folder: Path
    keys: Mapping[str, str]
    threads: int

    def read(self, name: str, prompts: Sequence[Prompt]) -> list[Decoded] | None:
        """What this drafter made of a group; None where that is still to be done."""
        found = self._document(name, prompts)
        return None if found is None else [Decoded(_generation(a), _generation(b), gap) for a, b, gap in found["outcomes"]]

    def threads_of(self, name: str, prompts: Sequence[Prompt]) -> int | None:
        """How many threads a recorded group was decoded with."""
        found = self._document(name, prompts)
        return None if found is None else int(found["threads"])

    def write(self, name: str, prompts: Sequence[Prompt], outcomes: Sequence[Decoded]) -> None:
        rows = [[asdict(outcome.drafted), asdict(outcome.plain), outcome.gap] for outcome in outcomes]
        write_json(self._path(name, prompts), {"drafter": name, "threads": self.threads, "outcomes": rows})

    def _document(self, name: str, prompts: Sequence[Prompt]) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._path(name, prompts).read_text()))
        except (FileNotFoundError, ValueError):
            return None  # damaged is as good as missing: it is decoded again

    def _path(self, name: str, prompts: Sequence[Prompt]) -> Path:
        digest = hashlib.blake2b(json.dumps([[p.number, *p.token_ids] for p in prompts]).encode(), digest_size=8).hexdigest()
        return self.folder / self.keys[name] / f"{digest}.json"


@dataclass(frozen=True)
class Work:
    """All groups of an evaluation, and by whom each is still to be decoded."""

    groups: tuple[Group, ...]

    @classmethod
    def plan(cls, sets: Sequence[PromptSet], names: Sequence[str], batch_size: int, files: OutcomeFiles) -> "Work":
        """Groups never span two sets and do not depend on what is done already, so neither do the tokens."""
        groups = []
        for prompts in batches(sets, batch_size):
            missing = tuple(name for name in names if files.read(name, prompts) is None)
            if missing:
                groups.append(Group(prompts, missing))
        return cls(tuple(groups))

    @property
    def decodings(self) -> int:
        """Prompts times ways of decoding, plain decoding included."""
        return sum(decodings(group) for group in self.groups)


def decodings(group: Group) -> int:
    """How many texts a group gives."""
    return len(group.prompts) * (1 + sum(name != PLAIN for name in group.names))


def batches(sets: Iterable[PromptSet], batch_size: int) -> Iterator[tuple[Prompt, ...]]:
    """The prompts in the groups in which they are decoded."""
    for part in sets:
        for start in range(0, len(part.prompts), batch_size):
            yield part.prompts[start : start + batch_size]


def collect(sets: Sequence[PromptSet], names: Sequence[str], batch_size: int, files: OutcomeFiles) -> Outcomes:
    """Everything that was decoded, from the files."""
    return {
        name: {
            part.name: [outcome for prompts in batches([part], batch_size) for outcome in files.read(name, prompts) or ()] for part in sets
        }
        for name in names
    }


def recorder(work: Work, files: OutcomeFiles, on_done: Callable[[int], None]) -> Callable[[int, dict[str, list[Decoded]]], None]:
    """What a decoder pool calls with each finished group: file it, then tell the progress bar."""

    def record(index: int, results: dict[str, list[Decoded]]) -> None:
        group = work.groups[index]
        for name, outcomes in results.items():
            files.write(name, group.prompts, outcomes)
        on_done(decodings(group))

    return record


def _generation(value: dict[str, Any]) -> Generation:
    rounds = [Round(r["drafted"], r["accepted"], r["committed"], tuple(r["confidence"]), tuple(r["draft"])) for r in value["rounds"]]
    return Generation(value["tokens"], rounds, value["finish_reason"], Seconds(**value["seconds"]))
