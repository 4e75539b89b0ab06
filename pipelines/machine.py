"""What a job takes from the machine and the checkout that it runs in."""

import subprocess
from pathlib import Path

import torch

from pipelines.machine_checks import usable_cores


def engine_count(count: int | None, gpus: float | None, threads: int, tensor_parallel: int = 1) -> tuple[int, float]:
    """(engines, GPUs each): as asked, else one for each `tensor_parallel` GPUs, else one for each `threads` CPU cores."""
    available = torch.cuda.device_count()
    each = float(tensor_parallel if available else 0) if gpus is None else gpus
    if count is not None:
        return count, each
    if available:
        return max(int(available / each), 1) if each else available, each
    return max(usable_cores() // threads, 1), 0.0


def default_batch_rows() -> int:
    """Rows that one answering engine works on at a time: a GPU gains from many, a CPU core is busy with few."""
    return 256 if torch.cuda.device_count() else 64


def git_revision() -> str | None:
    """Of the code that runs, where it is a checkout."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
