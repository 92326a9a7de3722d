"""Large payloads and results beside the database, as files or in object storage.

A body of several megabytes would pass through a database twice (its log, then its pages) and
hold up the small records behind it. Above `INLINE_BYTES` it goes into a file instead, which is
there for good before the row that names it is committed. A file whose row never came goes to the
trash later.

A file's name ends with a checksum of what it held, so that damage is noticed and not replayed.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

from tinsmith import disk
from tinsmith.server.store.errors import StoreDamagedError

INLINE_BYTES = 64 * 1024
"""Largest payload or result that is kept in its row."""


class BlobFiles(Protocol):
    """Where they are kept."""

    async def write(self, name: str, data: bytes) -> None:
        """Returns when it is there for good. It may be there already, and the same."""
        ...

    async def read(self, name: str) -> bytes:
        """Raises `StoreDamagedError` when it is missing."""
        ...

    async def delete(self, names: Collection[str]) -> None: ...


class Blobs:
    def __init__(self, files: BlobFiles, inline_bytes: int = INLINE_BYTES) -> None:
        self._files = files
        self._inline_bytes = inline_bytes

    def takes(self, data: bytes) -> bool:
        """Whether this is too large for its row."""
        return len(data) > self._inline_bytes

    async def write(self, name: str, data: bytes) -> str:
        """Keep `data` for good; the name to read it by, which begins with `name` (two letters or
        more). Written twice, as when a commit has to be tried again, it is there once."""
        name = f"{name}.{_checksum(data)}"
        await self._files.write(name, data)
        return name

    async def read(self, name: str) -> bytes:
        data = await self._files.read(name)
        _, dot, expected = name.rpartition(".")
        if dot and expected != _checksum(data):
            raise StoreDamagedError(f"file {name} is damaged: its checksum differs")
        return data

    async def delete(self, names: Collection[str]) -> None:
        if names:
            await self._files.delete(names)


class FolderBlobs:
    """Requests and results as files in a folder."""

    def __init__(self, folder: Path, in_thread: Callable[..., Awaitable[Any]]) -> None:
        """`in_thread` calls a function where it may wait for the disk."""
        self._folder = folder
        self._in_thread = in_thread

    async def write(self, name: str, data: bytes) -> None:
        await self._in_thread(self._write, name, data)

    async def read(self, name: str) -> bytes:
        data: bytes = await self._in_thread(self._read, name)
        return data

    async def delete(self, names: Collection[str]) -> None:
        await self._in_thread(self._delete, [self._path(name) for name in names])

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        disk.create_folder(path.parent)
        disk.publish_file(path, data)

    def _read(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            raise StoreDamagedError(f"file {name} is missing") from None

    def _delete(self, paths: Iterable[Path]) -> None:
        for path in paths:
            disk.discard_file(path)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
