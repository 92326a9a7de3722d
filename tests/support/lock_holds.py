"""Whether a function keeps other threads from running for long."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

from tinsmith.server.thread_turns import short_waits

_NAP_SECONDS = 0.0002


def is_held_less(function: Callable[[], object], seconds: float, *, tries: int = 5) -> bool:
    """Whether `function`, in a thread, never keeps the interpreter's lock for so long.

    In processor time of that thread, and in one of some tries: other programs on the machine
    hardly count. Where the lock is free, as in numpy's loops, another thread looks in between.
    """
    gc.collect()
    gc.disable()  # as in a server
    try:
        return any(_longest(function) < seconds for _ in range(tries))
    finally:
        gc.enable()


def _longest(function: Callable[[], object]) -> float:
    may_begin, is_over, may_end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        may_begin.wait()
        function()
        time.sleep(0)  # what was freed at its end counts
        is_over.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    found = [0.0]
    try:
        with short_waits():
            may_begin.set()
            while not is_over.is_set():
                before = time.clock_gettime(clock)
                time.sleep(_NAP_SECONDS)
                found.append(time.clock_gettime(clock) - before)
    finally:
        may_end.set()
        thread.join()
    return max(found)
