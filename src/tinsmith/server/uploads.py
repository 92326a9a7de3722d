"""Files that clients bring, piece by piece, until something is made of them.

A piece that comes again replaces itself. Uploads live in memory and in a folder that is emptied
when the server starts, so one that a crash has interrupted has to be sent again. Of servers that
share the folder each has one of its own in it, by the epoch of its lease, and removes those of
earlier ones: a server that is late removes nothing of its successor.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith import disk
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.server.edge.workers import Workers
from tinsmith.types.imports import ADAPTER_FILES, MAX_PIECES, UploadedFile

_ID = re.compile(r"[0-9a-f]{32}")
_MAX_UPLOADS = 8
_IDLE_SECONDS = 3600.0


@dataclass(slots=True)
class _Upload:
    folder: Path
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    """The bytes of each piece, by file and number, from when it begins to be written."""
    written: set[tuple[str, int]] = field(default_factory=set)
    """The pieces that are on disk."""
    used_at: float = field(default_factory=time.monotonic)


class Uploads:
    def __init__(
        self, root: Path, max_owner_bytes: int, workers: Workers, epoch: int | None = None
    ) -> None:
        """`max_owner_bytes` bounds what one owner has in uploads at a time; `workers` write it, and
        `epoch` is that of the lease, where several servers share the folder."""
        self._root = root
        self._epoch = epoch
        self._folder = root / str(epoch or 0)
        self._max_owner_bytes = max_owner_bytes
        self._workers = workers
        self._uploads: dict[tuple[str, str], _Upload] = {}

    def clear(self) -> None:
        """Remove what earlier servers left. Only before anything is uploaded."""
        if self._epoch is None:
            disk.discard_folder(self._root)
            return
        for folder in self._root.iterdir() if self._root.exists() else ():
            if not folder.name.isdecimal() or int(folder.name) < self._epoch:
                disk.discard_folder(folder)

    async def put(self, owner: str, upload_id: str, name: str, number: int, data: bytes) -> None:
        if name not in ADAPTER_FILES:
            raise ValidationError(f"{name[:80]!r} is not one of {', '.join(ADAPTER_FILES)}", "name")
        if not 0 <= number < MAX_PIECES:
            raise ValidationError(f"must be between 0 and {MAX_PIECES - 1}, got {number}", "number")
        upload = self._open(owner, upload_id)
        before = upload.sizes.get((name, number), 0)
        total = self._num_bytes(owner) + len(data) - before
        if total > self._max_owner_bytes:
            raise TooLargeError(
                f"your uploads would have {total} bytes; at most {self._max_owner_bytes} may be "
                "under way"
            )
        upload.sizes[name, number] = max(len(data), before)
        upload.used_at = time.monotonic()
        await self._workers.run(owner, _write_piece, upload.folder, name, number, data)
        upload.written.add((name, number))
        if self._uploads.get((owner, upload_id)) is not upload:
            # It was discarded meanwhile, and its folder made again for this piece.
            await asyncio.to_thread(disk.discard_folder, upload.folder)

    def _open(self, owner: str, upload_id: str) -> _Upload:
        if not _ID.fullmatch(upload_id):
            raise ValidationError("must be 32 hexadecimal digits", "upload_id")
        if (owner, upload_id) not in self._uploads:
            if sum(each == owner for each, _ in self._uploads) >= _MAX_UPLOADS:
                raise ValidationError(
                    f"{_MAX_UPLOADS} of your uploads are under way; finish one, or wait an hour",
                    "upload_id",
                )
            # Never the folder of an earlier one of this id, into which pieces may still be written.
            self._uploads[owner, upload_id] = _Upload(self._folder / uuid.uuid4().hex)
        return self._uploads[owner, upload_id]

    def _num_bytes(self, owner: str) -> int:
        uploads = (each for (of, _), each in self._uploads.items() if of == owner)
        return sum(size for each in uploads for size in each.sizes.values())

    async def join(self, owner: str, upload_id: str, files: Sequence[UploadedFile]) -> Path:
        """A folder with the files, put together of their pieces and checked."""
        upload = self._uploads.get((owner, upload_id))
        if upload is None:
            raise ValidationError(
                "there is no such upload; if the server was restarted meanwhile, send it again",
                "upload_id",
            )
        names = [file.name for file in files]
        if sorted(names) != sorted(ADAPTER_FILES):
            raise ValidationError(f"must be {' and '.join(ADAPTER_FILES)}", "files")
        for file in files:
            if not 0 <= file.num_pieces <= MAX_PIECES:
                raise ValidationError(
                    f"num_pieces must be between 0 and {MAX_PIECES}, got {file.num_pieces}", "files"
                )
            missing = {(file.name, n) for n in range(file.num_pieces)}
            if missing := missing - upload.written:
                raise ValidationError(f"piece {min(missing)[1]} of {file.name} is missing", "files")
        upload.used_at = time.monotonic()
        return await self._workers.run(owner, _join, upload.folder, files)

    async def discard(self, owner: str, upload_id: str) -> None:
        upload = self._uploads.pop((owner, upload_id), None)
        if upload is not None:
            await asyncio.to_thread(disk.discard_folder, upload.folder)

    async def sweep(self) -> None:
        """Remove abandoned uploads."""
        since = time.monotonic() - _IDLE_SECONDS
        for key, upload in list(self._uploads.items()):
            if upload.used_at < since:
                await self.discard(*key)


def _write_piece(folder: Path, name: str, number: int, data: bytes) -> None:
    disk.create_folder(folder)
    disk.publish_file(folder / f"{name}.{number}", data)


def _join(folder: Path, files: Sequence[UploadedFile]) -> Path:
    whole = folder / "whole"
    disk.discard_folder(whole)
    disk.create_folder(whole)
    for file in files:
        record = disk.write_file(whole / file.name, _pieces(folder, file))
        if record.sha256 != file.sha256:
            raise ValidationError(
                f"{file.name} has another checksum than announced; send it again", "files"
            )
    return whole


def _pieces(folder: Path, file: UploadedFile) -> Iterator[bytes]:
    for number in range(file.num_pieces):
        yield (folder / f"{file.name}.{number}").read_bytes()
