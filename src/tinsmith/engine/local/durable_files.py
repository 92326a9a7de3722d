"""Folders on disk that are there whole, or not there at all, whatever happens meanwhile.

A new folder is written under a hidden sibling name, every file and the folder itself are synced,
and then it is renamed: after a crash there is either nothing under the final name or everything.
These few functions are the only ones through which checkpoints touch the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import ValidationError


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
    create_parents(folder)
    draft = folder.with_name(f".{folder.name}.draft")
    discard_folder(draft)
    draft.mkdir()
    try:
        yield draft
        publish_folder(draft, folder)
    except BaseException:
        discard_folder(draft)
        raise


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and sync it; returns its size and checksum, taken on the way."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the folder's list of names durable; syncing its files does not do that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish_folder(draft: Path, folder: Path) -> None:
    """Give a finished draft its name, durably."""
    sync_folder(draft)
    # rename() would replace an empty folder without a word.
    if os.path.lexists(folder):
        raise ValidationError(f"{folder.name!r} exists already and is not overwritten")
    draft.rename(folder)
    sync_folder(folder.parent)


def create_parents(folder: Path) -> None:
    """Make the folders above, each durable before the next is put into it."""
    missing = []
    parent = folder.parent
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
        sync_folder(made.parent)


def discard_folder(folder: Path) -> None:
    if os.path.lexists(folder):
        shutil.rmtree(folder)


def describe_file(path: Path) -> FileRecord:
    """What a file holds now."""
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
