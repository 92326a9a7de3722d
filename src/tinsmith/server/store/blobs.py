"""Large payloads and results as files beside the database.

A body of several megabytes would pass through a database twice (its log, then its pages) and
hold up the small records behind it. Above `INLINE_BYTES` it goes into a file instead: written and
synced by the thread that received it, before the row that names it is committed. A file whose row
never came is swept away at the next start.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tinsmith import disk

INLINE_BYTES = 64 * 1024
"""Largest payload or result that is kept in its row."""


class Blobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        disk.create_folder(folder)

    def write(self, name: str, data: bytes) -> str:
        """Keep `data` for good under a name of two letters and more; the name again.

        Written twice under one name, as when a commit has to be tried again, it is there once.
        """
        path = self._path(name)
        disk.create_folder(path.parent)
        disk.publish_file(path, data)
        return name

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def delete(self, names: Collection[str]) -> None:
        for name in names:
            disk.discard_file(self._path(name))

    def sweep(self, known: Collection[str]) -> int:
        """Delete every file that is not known; how many there were."""
        stray = [f for f in self._folder.glob("??/*") if f.name not in known]
        for file in stray:
            disk.discard_file(file)
        return len(stray)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name
