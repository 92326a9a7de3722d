"""A disk that forgets what was not synced when the power fails, and that can refuse to write.

The database's own files are left out: SQLite is known to sync what it has committed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tinsmith.server.store.blobs import FolderBlobs


class SimulatedDisk:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: set[int] = set()
        """Files, by inode."""
        self._names: dict[int, set[str]] = {}
        """What each folder was known to hold when it was synced last, by inode."""
        self.is_full = False

    def fsync(self, descriptor: int) -> None:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            self._names[about.st_ino] = set(os.listdir(descriptor))
        else:
            self._synced.add(about.st_ino)

    def lose_power(self) -> None:
        self._forget(self._root)

    def _forget(self, folder: Path) -> None:
        known = self._names.get(folder.stat().st_ino, set())
        for path in sorted(folder.iterdir()):
            if folder == self._root and path.name.startswith("tinsmith.db"):
                continue
            if path.name not in known:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                self._forget(path)
            elif path.stat().st_ino not in self._synced:
                path.write_bytes(b"")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Requests and results that are kept as files are written here."""
        write = FolderBlobs.write

        async def write_or_fail(blobs: FolderBlobs, name: str, data: bytes) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "no space left on the simulated disk")
            await write(blobs, name, data)

        with patch.object(FolderBlobs, "write", write_or_fail):
            yield
