"""Files of weights over HTTP: whole or from any byte on, with an ETag and a digest.

Weights never change once they are written, so their id is a version: whoever continues a download
(`If-Range`) gets the rest of the same bytes, or everything. An archive is put together as it is
read: nothing is written or held as a whole, and no thread waits while a slow client does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
import re
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

Reading = Callable[[], AbstractAsyncContextManager[object]]
Digests = Callable[[Callable[["Content"], bytes], "Content"], Awaitable[bytes]]
"""Calls a function where it may take seconds: in a thread, and in its owner's turn."""

_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FilePart:
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes to be fetched: pieces of memory and files, one after the other."""

    version: str
    """Two contents of one version are the same bytes."""
    media_type: str
    parts: Sequence[bytes | FilePart] = field(compare=False)

    @property
    def size(self) -> int:
        return sum(_size(part) for part in self.parts)


def file_content(weights_id: str, folder: Path, name: str) -> Content:
    path = folder / name
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    part = FilePart(path, path.stat().st_size)
    return Content(f"{weights_id}/{name}", media_type, [part])


def archive_content(weights_id: str, folder: Path, names: Sequence[str]) -> Content:
    """A tar of some files. Their times are part of it: files that were put back from a copy make
    another archive of the same weights."""
    parts: list[bytes | FilePart] = []
    times = []
    for name in names:
        facts = (folder / name).stat()
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime, entry.mode = facts.st_size, int(facts.st_mtime), 0o644
        parts += [entry.tobuf(), FilePart(folder / name, facts.st_size)]
        parts.append(bytes(-facts.st_size % tarfile.BLOCKSIZE))
        times.append(str(entry.mtime))
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    version = f"{weights_id}.tar of {' '.join(times)}"
    return Content(version, "application/x-tar", parts)


async def respond(
    request: Request, content: Content, digests: Digests, reading: Reading = nullcontext
) -> Response:
    """What was asked for of some content: all, a range, or that it is the same as before.

    `digests` work out that of all of it, and `reading` keeps its files where they are, now for the
    caller and later for the answer."""
    etag = f'"{hashlib.sha256(content.version.encode()).hexdigest()[:32]}"'
    headers = {"etag": etag, "accept-ranges": "bytes"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if "sha-256" in request.headers.get("want-repr-digest", ""):
        digest = await digests(_sha256, content)
        headers["repr-digest"] = f"sha-256=:{base64.b64encode(digest).decode()}:"
    size = content.size
    asked = _range(request, etag)
    if asked is None:
        start, stop, status = 0, size, 200
    else:
        start, stop, status = asked[0], min(asked[1] or size, size), 206
        if start >= stop:
            return Response(status_code=416, headers={"content-range": f"bytes */{size}"})
        headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
    headers["content-length"] = str(stop - start)
    return StreamingResponse(
        _read(content, start, stop, reading),
        status_code=status,
        headers=headers,
        media_type=content.media_type,
    )


def _range(request: Request, etag: str) -> tuple[int, int | None] | None:
    """First byte, and the one after the last; None for all: what is not a single range, or is
    for another version, is answered with everything, as HTTP allows."""
    found = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", request.headers.get("range", ""))
    if found is None or request.headers.get("if-range", etag) != etag:
        return None
    return int(found[1]), int(found[2]) + 1 if found[2] else None


async def _read(content: Content, start: int, stop: int, reading: Reading) -> AsyncIterator[bytes]:
    async with reading():
        async for piece in _pieces_of(content, start, stop):
            yield piece


async def _pieces_of(content: Content, start: int, stop: int) -> AsyncIterator[bytes]:
    position = 0
    for part in content.parts:
        first, last = max(start - position, 0), min(stop - position, _size(part))
        position += _size(part)
        if first >= last:
            continue
        if isinstance(part, bytes):
            yield part[first:last]
            continue
        with await asyncio.to_thread(part.path.open, "rb") as file:
            file.seek(first)
            while first < last:
                piece = await asyncio.to_thread(file.read, min(last - first, _PIECE_BYTES))
                if not piece:
                    raise OSError(f"{part.path.name} became shorter while it was read")
                first += len(piece)
                yield piece


def _size(part: bytes | FilePart) -> int:
    return len(part) if isinstance(part, bytes) else part.size


@lru_cache(maxsize=1024)
def _sha256(content: Content) -> bytes:
    digest = hashlib.sha256()
    for part in content.parts:
        for piece in [part] if isinstance(part, bytes) else _pieces(part.path):
            digest.update(piece)
    return digest.digest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
