"""One file over HTTP: resumed where it broke off, checked, and never made of two versions.

A file grows as `NAME.part` and gets its name when it is whole. `NAME.version` holds the ETag of
what is there. A part is continued only if the server still has that version (`If-Range`), and a
whole file is kept only if it does (`If-None-Match`); otherwise the file is fetched anew, as it is
where the server gives no strong ETag. If the server states a SHA-256, the file must have it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.client.uplink.uplink import Uplink
from tinsmith.errors import APIConnectionError, APIStatusError, TinkerError, ValidationError
from tinsmith.transport.base import Request, Response
from tinsmith.transport.retry import Attempts
from tinsmith.wire.endpoints import ConnectionClass

CHUNK_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is. Sizes are in bytes; `total` is None until the server says it."""

    file: str
    done: int
    total: int | None


ProgressCallback = Callable[[Progress], None]


async def fetch(
    uplink: Uplink, url: str, name: str, target: Path, on_progress: ProgressCallback | None = None
) -> None:
    """Fetch `url` into `target`; `name` is what errors and progress call it.

    What is there of an earlier attempt is used if the server still has that version. The address
    carries its own permission, so no credential goes along.
    """
    if not url.startswith(("https://", "http://")):
        raise ValidationError(f"the address of {name} is not an HTTP address: {url[:40]!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    local = _Local(target)

    async def attempt(attempts: Attempts) -> Response:
        def report(progress: Progress) -> None:
            attempts.start_over()
            if on_progress is not None:
                on_progress(progress)

        return await _continue(uplink, url, name, local, report)

    head = await uplink.api.repeater.run(attempt, uplink.config.retry)
    if head.status_code == 304:
        return
    expected = stated_sha256(head.headers)
    if expected is not None:
        found = await asyncio.to_thread(_sha256, local.part)
        if found != expected:
            local.forget()
            raise TinkerError(f"{name} was damaged in transit: SHA-256 {found}, not {expected}")
    local.part.replace(target)


def forget_version(target: Path) -> None:
    """Remove the note beside a file that is not going to be fetched again."""
    _Local(target).version_file.unlink(missing_ok=True)


class _Local:
    """What is here of a file: a part or all of it, and which version it is."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.part = target.with_name(target.name + ".part")
        self.version_file = target.with_name(target.name + ".version")

    @property
    def version(self) -> str | None:
        """The ETag of what is here; None: there is nothing, or its version is unknown."""
        return self.version_file.read_text() if self.version_file.exists() else None

    def start(self, version: str | None) -> None:
        """Forget what is here, before the new version is noted: the old bytes must never be
        taken for the new version's."""
        self.forget()
        if version is not None:
            self.version_file.write_text(version)

    def forget(self) -> None:
        for path in (self.target, self.part, self.version_file):
            path.unlink(missing_ok=True)


async def _continue(
    uplink: Uplink, url: str, name: str, local: _Local, on_progress: ProgressCallback
) -> Response:
    """Fetch what is missing, in one request."""
    headers = {"Accept-Encoding": "identity", "Want-Repr-Digest": "sha-256=10"}
    done = 0
    version = local.version
    if version is None:
        local.forget()
    elif local.target.exists():
        headers["If-None-Match"] = version
    elif local.part.exists():
        done = local.part.stat().st_size
        headers |= {"Range": f"bytes={done}-", "If-Range": version}
    request = Request(
        method="GET",
        url=url,
        headers=headers,
        connection=ConnectionClass.REDIRECT,
        timeout_seconds=CHUNK_TIMEOUT_SECONDS,
    )
    try:
        async with uplink.api.http.stream(request) as (head, pieces):
            if head.status_code == 304:
                return head
            if head.status_code != 206:
                done = 0
                local.start(_strong_etag(head))
            elif _start(head) != done or head.headers.get("etag", version) != version:
                raise _not_continued(local, request, name)
            total = _total(head, done)
            with local.part.open("ab" if done else "wb") as file:
                async for piece in pieces:
                    # In a thread: a slow disk must not hold up the other clients of this loop.
                    await asyncio.to_thread(file.write, piece)
                    done += len(piece)
                    on_progress(Progress(name, done, total))
    except APIStatusError as error:
        if error.status_code == 416 and done:
            raise _not_continued(local, request, name) from error
        raise
    if total is not None and done != total:
        raise APIConnectionError(request, f"{name} ended after {done} of {total} bytes.")
    return head


def _not_continued(local: _Local, request: Request, name: str) -> APIConnectionError:
    local.forget()
    return APIConnectionError(request, f"{name} cannot be continued; it is fetched from the start.")


def _strong_etag(head: Response) -> str | None:
    etag = head.headers.get("etag", "")
    return etag if etag.startswith('"') else None


def _start(head: Response) -> int | None:
    """The offset at which a partial answer begins, as the server states it."""
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
