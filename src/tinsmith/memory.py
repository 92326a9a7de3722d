"""How much memory this process has."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the system counts the peak."""


def process_bytes() -> int:
    """Memory in use; the most there ever was where the system does not say more."""
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_pages * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT
