"""Every write to the data folder, in a few named functions.

What they write is there complete or not at all, whatever happens meanwhile. A new folder is written
under a hidden sibling name, every file and the folder itself are synced, and then it is renamed; a
new file likewise. After a crash there is nothing under the final name, or everything.

A function marked `@writes` is a point where a process may die: a test ends the process before and
after each of them, and another checks that the server and the engine write in no other way.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tinsmith.errors import ValidationError

_F = TypeVar("_F", bound=Callable[..., Any])

WRITES: list[str] = []
"""The names of the functions that write."""

_DRAFT_SUFFIX = ".draft"
_COPIED_AT_ONCE = 1024 * 1024
_LARGE_VIEW = 64 * 1024
"""From this size on, a view is hashed by a thread."""


def writes(function: _F) -> _F:
    """Mark a function that changes what is on disk."""
    WRITES.append(function.__name__)
    return function


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file held when it was written."""

    size: int
    sha256: str


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft to fill; it becomes `folder` when the block ends, and is removed if the block fails.

    A draft that an earlier, interrupted attempt left behind is removed first.
    """
    if os.path.lexists(folder):
        raise ValidationError(f"{folder.name!r} exists already and is not overwritten")
    draft = draft_of(folder)
    create_folder(folder.parent)
    discard_folder(draft)
    create_draft(draft)
    try:
        yield draft
        publish_folder(draft, folder)
    except BaseException:
        discard_folder(draft)
        raise


def draft_of(path: Path) -> Path:
    """What a file or folder is called before it is finished."""
    return path.with_name(f".{path.name}{_DRAFT_SUFFIX}")


def is_draft(path: Path) -> bool:
    """Whether a file or folder is one that was not finished."""
    return path.name.startswith(".") and path.name.endswith(_DRAFT_SUFFIX)


class Sink:
    """A file that is being written, with its size and checksum so far.

    Large views of memory, such as tensors, are read for the checksum by a thread while they are
    written and synced, which takes about as long: they must stay as they are until `close`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self._behind: queue.SimpleQueue[bytes | memoryview | None] | None = None
        self._thread: threading.Thread | None = None

    def write(self, part: bytes | memoryview) -> int:
        self._size += len(part)
        if self._behind is None and isinstance(part, memoryview) and len(part) >= _LARGE_VIEW:
            self._behind = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._read_behind, name="checksum", daemon=True)
            self._thread.start()
        if self._behind is None:
            self._digest.update(part)
        else:
            self._behind.put(part)
        return self._file.write(part)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> FileRecord:
        """Wait for the checksum; what was written."""
        if self._behind is not None and self._thread is not None:
            self._behind.put(None)
            self._thread.join()
        return FileRecord(self._size, self._digest.hexdigest())

    def _read_behind(self) -> None:
        assert self._behind is not None
        while (part := self._behind.get()) is not None:
            self._digest.update(part)


@writes
def write_file(
    path: Path, parts: Iterable[bytes | memoryview] | Callable[[Sink], object]
) -> FileRecord:
    """Write a new file, from parts or by a function that fills it, and sync it; returns its size
    and checksum, taken on the way."""
    with path.open("xb") as file:
        sink = Sink(file)
        try:
            if callable(parts):
                parts(sink)
            else:
                for part in parts:
                    sink.write(part)
            file.flush()
            os.fsync(file.fileno())
        finally:
            record = sink.close()
    return record


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copy a file to a new place; the size and checksum of what was copied."""
    with source.open("rb") as file:
        return write_file(target, iter(partial(file.read, _COPIED_AT_ONCE), b""))


@writes
def publish_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write `data` to a file, durably: afterwards the file has all of it, or is as it was.

    Each call has a draft of its own: of those that publish a file at once, the last one's data is
    there in the end. A draft that a crash leaves goes when its folder is swept.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_DRAFT_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@writes
def mark(path: Path, text: bytes) -> None:
    """Overwrite a file with a short text of a fixed length, without syncing: it survives the death
    of the process, but perhaps not that of the machine."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, text, 0)
    finally:
        os.close(handle)


@writes
def publish_folder(draft: Path, folder: Path) -> None:
    """Give a finished draft its name, durably."""
    sync_folder(draft)
    # rename() would silently replace an empty folder.
    if os.path.lexists(folder):
        raise ValidationError(f"{folder.name!r} exists already and is not overwritten")
    draft.rename(folder)
    sync_folder(folder.parent)


@writes
def create_folder(folder: Path) -> None:
    """Make a folder and those above it, each durable before the next is put into it."""
    missing = []
    wanted = folder
    while not wanted.exists():
        missing.append(wanted)
        wanted = wanted.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
        sync_folder(made.parent)


@writes
def create_draft(draft: Path) -> None:
    """Make a folder that need not outlive a crash."""
    draft.mkdir()


@writes
def move(path: Path, to: Path) -> None:
    """Give a file or folder another place in the same file system, durably."""
    if os.path.lexists(to):
        raise ValidationError(f"{to.name!r} exists already and is not overwritten")
    path.rename(to)
    sync_folder(to.parent)
    sync_folder(path.parent)


@writes
def discard_folder(folder: Path) -> None:
    """Remove a folder and all that is in it, if it exists."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)


@writes
def discard_file(path: Path) -> None:
    """Remove a file, if it exists."""
    path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make durable what another program wrote to a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the folder's list of names durable; syncing its files does not do that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; links are not followed."""
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())


def describe_file(path: Path) -> FileRecord:
    """What a file holds now."""
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
