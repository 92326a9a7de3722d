"""Ctrl-C in a run: the first lets the step end and saves, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    is_wanted = False


@contextmanager
def noticed(tell: Callable[[], None]) -> Iterator[Interruption]:
    """`tell` is called at the first Ctrl-C; at the second KeyboardInterrupt is raised as ever."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # signals are not for other threads to take
        return

    def notice(number: int, frame: FrameType | None) -> None:
        interruption.is_wanted = True
        signal.signal(signal.SIGINT, before)
        tell()

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
