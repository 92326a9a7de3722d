"""Print where `make check` keeps the files of its tests: in memory, where there is room.

Tests write thousands of small databases, and a disk makes them wait at every commit. `make test`
stays on the disk, so that the file system which servers use is tested as well.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

IN_MEMORY = Path("/dev/shm")
NEEDED_BYTES = 2 * 2**30
"""Several times what a run has written at its end; containers often have 64 MB there."""


def scratch_folder(in_memory: Path = IN_MEMORY, needed_bytes: int = NEEDED_BYTES) -> Path:
    """`in_memory`, if it can take files and programs of so many bytes, or the usual folder."""
    try:
        facts = os.statvfs(in_memory)
    except OSError:
        return Path(tempfile.gettempdir())
    has_room = facts.f_bavail * facts.f_frsize >= needed_bytes
    runs_programs = not facts.f_flag & getattr(os, "ST_NOEXEC", 0)
    is_usable = has_room and runs_programs and os.access(in_memory, os.W_OK)
    return in_memory if is_usable else Path(tempfile.gettempdir())


if __name__ == "__main__":
    print(scratch_folder())
