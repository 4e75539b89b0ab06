"""SIGTERM as a wish: what is done so far is kept, then the job ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipelines.job import notices


@contextmanager
def stop_on_sigterm(
    what: str = "the workers write a checkpoint after the step that they are in", event: threading.Event | None = None
) -> Iterator[threading.Event]:
    """An event that the first SIGTERM sets; a second one ends the process as usual.

    Args:
        what: happens then, for the person who watches.
        event: to be set; None for a new one.
    """
    stop = event or threading.Event()

    def on_signal(*_: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        stop.set()
        notices.print(f"[yellow]stopping[/]: {what}")

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
