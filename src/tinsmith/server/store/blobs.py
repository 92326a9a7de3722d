"""Large payloads and results as files beside the database.

A body of several megabytes would pass through a database twice (its log, then its pages) and
hold up the small records behind it. Above `INLINE_BYTES` it goes into a file instead: written and
synced by the thread that received it, before the row that names it is committed. A file whose row
never came is swept away at the next start.

A file's name ends with a checksum of what it held, so that damage is noticed and not replayed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from pathlib import Path

from tinsmith import disk
from tinsmith.server.store.base import StoreDamagedError

INLINE_BYTES = 64 * 1024
"""Largest payload or result that is kept in its row."""


class Blobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        disk.create_folder(folder)

    def write(self, name: str, data: bytes) -> str:
        """Keep `data` for good; the name to read it by, which begins with `name` (two letters or
        more). Written twice, as when a commit has to be tried again, it is there once."""
        name = f"{name}.{_checksum(data)}"
        path = self._path(name)
        disk.create_folder(path.parent)
        disk.publish_file(path, data)
        return name

    def read(self, name: str) -> bytes:
        data = self._path(name).read_bytes()
        _, dot, expected = name.rpartition(".")
        if dot and expected != _checksum(data):
            raise StoreDamagedError(f"file {name} is damaged: its checksum differs")
        return data

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


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
