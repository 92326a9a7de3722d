"""How much memory this process and its machine have."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
"""The unit, in bytes, in which the system counts the peak."""

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Bytes, or "max"."""


def process_bytes() -> int:
    """Memory in use; where the system reports only the peak, the peak."""
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_pages * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


def machine_bytes(container_limit: Path = _CONTAINER_LIMIT) -> int:
    """Memory of the machine, or of the container it is limited to."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(container_limit.read_text()))
    return total
