"""How long a function keeps other threads from running."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

from tinsmith.server.thread_turns import short_waits

_NAP_SECONDS = 0.0002


def longest_hold_seconds(function: Callable[[], object], *, tries: int = 5) -> float:
    """The longest time for which `function`, in a thread, keeps the interpreter's lock.

    In processor time of that thread, and the least of some tries: other programs on the machine
    hardly count. Where the lock is free, as in numpy's loops, another thread looks in between.
    """
    return min(_longest(function) for _ in range(tries))


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
    gc.collect()
    gc.disable()  # as in a server
    try:
        with short_waits():
            may_begin.set()
            while not is_over.is_set():
                before = time.clock_gettime(clock)
                time.sleep(_NAP_SECONDS)
                found.append(time.clock_gettime(clock) - before)
    finally:
        gc.enable()
        may_end.set()
        thread.join()
    return max(found)
