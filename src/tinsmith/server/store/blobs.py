"""Large payloads and results as files beside the database.

A body of several megabytes would pass through a database twice (its log, then its pages) and
hold up the small records behind it. Above `INLINE_BYTES` it goes into a file instead: written and
synced by the thread that received it, before the row that names it is committed. A file whose row
never came is swept away at the next start.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection
from pathlib import Path

INLINE_BYTES = 64 * 1024
"""Largest payload or result that is kept in its row."""


class Blobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, data: bytes) -> str:
        """Keep `data` for good; the name under which `read` finds it."""
        name = uuid.uuid4().hex
        folder = self._folder / name[:2]
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)
        if is_new:
            _sync_folder(self._folder)
        return name

    def read(self, name: str) -> bytes:
        return (self._folder / name[:2] / name).read_bytes()

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            (self._folder / name[:2] / name).unlink(missing_ok=True)

    def sweep(self, known: Collection[str]) -> int:
        """Delete every file that is not known; how many there were."""
        stray = [f for f in self._folder.glob("??/*") if f.name not in known]
        for file in stray:
            file.unlink(missing_ok=True)
        return len(stray)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
