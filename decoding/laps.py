"""Where the time of a round goes."""

import time
from collections import defaultdict

import torch


class Laps:
    """Books wall time by stage: each lap what has passed since the one before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> float:
        """Forget what was booked; the present second."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = self.now()
        return self._last

    def lap(self, stage: str) -> float:
        """The time since the last lap went into that stage; the present second."""
        before, self._last = self._last, self.now()
        self.seconds[stage] += self._last - before
        return self._last

    def now(self) -> float:
        """Seconds, once all that was asked of a GPU is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
