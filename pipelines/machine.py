"""What a job takes from the machine and the checkout that it runs in."""

import subprocess
from pathlib import Path

import torch

from actors.cluster import ClusterSettings, cluster_room
from pipelines.machine_checks import usable_cores


def room(settings: ClusterSettings) -> tuple[int, int]:
    """(CPU cores, GPUs) of this machine, or of all nodes of the cluster that is to be joined."""
    if settings.address == "local":
        return settings.cpus or usable_cores(), torch.cuda.device_count()
    return cluster_room(settings)


def engine_count(
    settings: ClusterSettings, count: int | None, gpus: float | None, threads: int, tensor_parallel: int = 1
) -> tuple[int, float]:
    """(engines, GPUs each): as asked, else one for each `tensor_parallel` GPUs, else one for each `threads` CPU cores."""
    cores, available = room(settings)
    each = float(tensor_parallel if available else 0) if gpus is None else gpus
    if count is not None:
        return count, each
    if available:
        return max(int(available / each), 1) if each else available, each
    return max(cores // threads, 1), 0.0


def decoder_count(settings: ClusterSettings, count: int | None, threads: int | None, gpus: float | None) -> tuple[int, int, float]:
    """(decoders, threads each, GPUs each): as asked, else one for each GPU, else one; they share the CPU cores."""
    cores, available = room(settings)
    decoders = count or max(available, 1)
    if not available:  # a decoder's threads must fit on one node, and this one is known
        cores = min(cores, settings.cpus or usable_cores())
    return decoders, threads or max(cores // decoders, 1), (1.0 if available else 0.0) if gpus is None else gpus


def default_batch_rows(gpus: float) -> int:
    """Rows that one answering engine works on at a time: a GPU gains from many, a CPU core is busy with few."""
    return 256 if gpus else 64


def git_revision() -> str | None:
    """Of the code that runs, where it is a checkout."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
