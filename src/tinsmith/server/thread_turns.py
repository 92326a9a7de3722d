"""How long Python's threads wait for each other.

A thread that wants the interpreter's lock asks for it after a while, by default 5 ms,
and the event loop wants it anew for each thing that happens: a connection, its bytes, a timer. A
heartbeat beside a thread that decodes a large body would wait seven times, for 36 ms in all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_SECONDS = 0.0005


@contextmanager
def short_waits() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(WAIT_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
