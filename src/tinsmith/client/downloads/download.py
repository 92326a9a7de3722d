"""Fetching checkpoints, file by file or as an archive: streamed, resumable, checked, confined.

A file is written beside its place and moved there when it is whole. What a broken download left is
continued, not fetched again. Where the server states a SHA-256, the file must have it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.client.connection.connection import Connection
from tinsmith.client.downloads.archive import check_free, confined, extract, put_in_place
from tinsmith.errors import APIConnectionError, APIStatusError, TinkerError, ValidationError
from tinsmith.transport.base import ConnectionClass, Request, Response
from tinsmith.transport.retry import RetryPolicy, decide
from tinsmith.types import ExternalWeightsUrlsResponse

logger = logging.getLogger(__name__)

CHUNK_TIMEOUT_SECONDS = 60.0
_PART = ".part"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is. Sizes are in bytes; `total` is None until the server says it."""

    file: str
    done: int
    total: int | None


ProgressCallback = Callable[[Progress], None]


async def download(
    connection: Connection,
    source: str,
    urls: ExternalWeightsUrlsResponse,
    folder: Path,
    on_progress: ProgressCallback | None = None,
) -> list[Path]:
    """Fetch every file of a checkpoint; they appear as `folder` when all are there.

    Returns where they are, in the order of the list.
    """
    check_free(folder)
    beside = unfinished(folder, source)
    for name, url in urls.urls.items():
        target = confined(beside, name)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            await _fetch(connection, url, name, target, on_progress)
    put_in_place(beside, folder)
    return [confined(folder, name) for name in urls.urls]


async def download_archive(
    connection: Connection,
    source: str,
    url: str,
    folder: Path,
    on_progress: ProgressCallback | None = None,
) -> list[Path]:
    """Fetch a tar archive of a checkpoint and unpack it as `folder`; its files."""
    check_free(folder)
    tar = unfinished(folder, source)
    if not tar.exists():
        tar.parent.mkdir(parents=True, exist_ok=True)
        await _fetch(connection, url, tar.name, tar, on_progress)
    try:
        files = await asyncio.to_thread(extract, tar, folder)
    except ValidationError:
        _forget(tar)
        raise
    # After any other failure, such as a full disk, the archive stays for the next attempt.
    _forget(tar)
    return files


def unfinished(folder: Path, source: str) -> Path:
    """Where a download to `folder` grows. What is left of one is continued for the same checkpoint
    alone: two must never be mixed."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return folder.with_name(f".{folder.name}.{digest}.download")


async def _fetch(
    connection: Connection,
    url: str,
    name: str,
    target: Path,
    on_progress: ProgressCallback | None,
) -> None:
    part = target.with_name(target.name + _PART)
    attempt = 0
    while True:
        before = _size(part)
        try:
            head = await _continue(connection, url, name, part, on_progress)
            break
        except (APIConnectionError, APIStatusError) as error:
            if isinstance(error, APIStatusError) and error.status_code == 416:
                _forget(part)  # what is there does not belong to this file
            if _size(part) > before:
                attempt = 0
            policy: RetryPolicy = connection.config.retry
            wait = decide(policy, error, attempt=attempt, elapsed_seconds=0.0)
            if wait is None and getattr(error, "status_code", None) != 416:
                raise
            logger.info("%s broke off (%s); going on", name, error)
            attempt += 1
            await asyncio.sleep(wait or 0.0)
    expected = stated_sha256(head.headers)
    if expected is not None:
        found = await asyncio.to_thread(_sha256, part)
        if found != expected:
            _forget(part)
            raise TinkerError(f"{name} was damaged on its way: SHA-256 {found}, not {expected}")
    part.replace(target)


async def _continue(
    connection: Connection, url: str, name: str, part: Path, on_progress: ProgressCallback | None
) -> Response:
    """Fetch what is missing of `part`, in one request. The address carries its own permission, so
    no credential goes along."""
    done = _size(part)
    request = Request(
        method="GET",
        url=url,
        headers={"Range": f"bytes={done}-", "Accept-Encoding": "identity"} if done else {},
        connection=ConnectionClass.REDIRECT,
        timeout_seconds=CHUNK_TIMEOUT_SECONDS,
    )
    async with connection.api.http.stream(request) as (head, pieces):
        if head.status_code != 206:
            done = 0  # the server sends it from the start
        elif _start(head) not in (None, done):
            _forget(part)  # not what was asked for: what is there cannot be continued
            raise APIConnectionError(request, f"{name} was continued at the wrong place.")
        total = _total(head, done)
        with part.open("ab" if done else "wb") as file:
            async for piece in pieces:
                # In a thread: a slow disk must not hold up the other clients of this loop.
                await asyncio.to_thread(file.write, piece)
                done += len(piece)
                if on_progress is not None:
                    on_progress(Progress(name, done, total))
    if total is not None and done != total:
        raise APIConnectionError(request, f"{name} ended after {done} of {total} bytes.")
    return head


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)


def _start(head: Response) -> int | None:
    """Where a part of a file begins, as its server says."""
    found = re.match(r"bytes (\d+)-", head.headers.get("content-range", ""))
    return int(found[1]) if found else None


def stated_sha256(headers: Mapping[str, str]) -> str | None:
    """The checksum of the whole file in hexadecimal, in whichever way a server states it."""
    if plain := headers.get("x-checksum-sha256"):
        return plain.lower()
    encoded = headers.get("x-amz-checksum-sha256")
    if found := re.search(r"sha-256=:([^:]+):", headers.get("repr-digest", "")):
        encoded = found[1]
    try:
        return base64.b64decode(encoded, validate=True).hex() if encoded else None
    except ValueError:
        return None  # of several parts, or of something else


def _total(head: Response, done: int) -> int | None:
    length = head.headers.get("content-length")
    return None if length is None or not length.isdigit() else done + int(length)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
