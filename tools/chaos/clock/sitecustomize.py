"""A wall clock that jumps; Python loads this file by its name.

The file that CHAOS_CLOCK names holds a number of seconds, which is added to the time of day from
the moment it is written.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

with Path(os.environ["CHAOS_CLOCK"]).open("rb") as file:
    AHEAD = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
TRUE_TIME = time.time


def jumping_time() -> float:
    ahead: float = struct.unpack_from("d", AHEAD)[0]
    return TRUE_TIME() + ahead


time.time = jumping_time
