"""Where things lie under a storage root: the one place that joins path parts."""

import re
from dataclasses import dataclass

from storage.errors import StorageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_name(name: str, what: str) -> str:
    """Return `name` if it can be one part of a key; it may come from a config or a file."""
    if not _NAME.fullmatch(name):
        raise StorageError(f"{what} {name!r} must be letters, digits, '.', '_' or '-' (at most 100, the first a letter or digit)")
    return name


@dataclass(frozen=True)
class Places:
    """Key prefixes of one target trained on one corpus."""

    target: str
    corpus: str

    def __post_init__(self) -> None:
        checked_name(self.target, "target.name")
        checked_name(self.corpus, "corpus.name")

    @property
    def prompts(self) -> str:
        return f"corpora/{self.corpus}"

    @property
    def answers(self) -> str:
        return f"{self.target}/{self.corpus}/answers"

    @property
    def cache(self) -> str:
        return f"{self.target}/{self.corpus}/cache"

    def run(self, name: str) -> str:
        return f"{self.target}/{self.corpus}/runs/{checked_name(name, 'run name')}"
