"""How many engines this machine takes by default."""

import torch

from pipelines.machine_checks import usable_cores


def engine_count(count: int | None, gpus: float | None, threads: int) -> tuple[int, float]:
    """(engines, GPUs each): as asked, else one for each GPU, else one for each `threads` CPU cores."""
    available = torch.cuda.device_count()
    each = (1.0 if available else 0.0) if gpus is None else gpus
    if count is not None:
        return count, each
    if available:
        return max(int(available / each), 1) if each else available, each
    return max(usable_cores() // threads, 1), 0.0
