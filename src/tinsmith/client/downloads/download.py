"""Fetching a checkpoint, file by file or as an archive; its folder appears when all is there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from tinsmith.client.downloads.archive import check_free, confined, extract, put_in_place
from tinsmith.client.downloads.file import ProgressCallback, fetch, forget_version
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.errors import ValidationError
from tinsmith.types import ExternalWeightsUrlsResponse

_SIGN_AGAIN = timedelta(minutes=5)
"""New addresses are asked for this long before the old ones expire."""


async def download(
    uplink: Uplink,
    source: str,
    sign: Callable[[], Awaitable[ExternalWeightsUrlsResponse]],
    folder: Path,
    on_progress: ProgressCallback | None = None,
) -> list[Path]:
    """Fetch every file of a checkpoint; they appear as `folder` when all are there.

    `sign` asks for the files' addresses. If a checkpoint is overwritten meanwhile, those of the
    new one are fetched. Returns where the files are, in the order of the list.
    """
    check_free(folder)
    beside = unfinished(folder, source)
    signed = await sign()
    for name in signed.urls:
        if datetime.now(UTC) >= signed.expires - _SIGN_AGAIN:
            fresh = await sign()
            if _places(fresh) != _places(signed):
                return await download(uplink, source, sign, folder, on_progress)
            signed = fresh
        await fetch(uplink, signed.urls[name], name, confined(beside, name), on_progress)
    _keep_only(beside, {confined(beside, name) for name in signed.urls})
    put_in_place(beside, folder)
    return [confined(folder, name) for name in signed.urls]


async def download_archive(
    uplink: Uplink, source: str, url: str, folder: Path, on_progress: ProgressCallback | None = None
) -> list[Path]:
    """Fetch a tar archive of a checkpoint and unpack it as `folder`; its files."""
    check_free(folder)
    tar = unfinished(folder, source)
    await fetch(uplink, url, tar.name, tar, on_progress)
    try:
        files = await asyncio.to_thread(extract, tar, folder)
    except ValidationError:
        _forget(tar)
        raise
    # After any other failure, such as a full disk, the archive stays for the next attempt.
    _forget(tar)
    return files


def unfinished(folder: Path, source: str) -> Path:
    """Where a download to `folder` grows: a place of its own for each checkpoint's path."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return folder.with_name(f".{folder.name}.{digest}.download")


def _places(signed: ExternalWeightsUrlsResponse) -> dict[str, str]:
    """Where the files are, without the signatures."""
    return {name: urlsplit(url).path for name, url in signed.urls.items()}


def _keep_only(beside: Path, wanted: set[Path]) -> None:
    """Remove the notes of versions, and what an earlier attempt has left of a checkpoint that had
    other files and was saved under the same path."""
    for path in sorted(beside.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in wanted:
            path.unlink()


def _forget(tar: Path) -> None:
    tar.unlink(missing_ok=True)
    forget_version(tar)
