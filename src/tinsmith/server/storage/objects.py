"""Objects in S3, Google Cloud Storage, Azure or a folder, through obstore.

The one module that knows obstore. Its calls wait, so each runs in a thread of its own pool: the
database's readers must not wait for a slow network. An object is there whole or not at all: a
large one is uploaded in parts and appears when the last is there. Each part is retried.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tinsmith import disk, extras
from tinsmith.disk import FileRecord
from tinsmith.errors import ValidationError
from tinsmith.server.store.errors import StoreDamagedError, StoreUnavailableError

T = TypeVar("T")

_NUM_THREADS = 16
_PIECE_BYTES = 4 * 1024 * 1024
_DELETED_AT_ONCE = 1000
# Any: theirs is a TypedDict of a package that may be missing.
_OPTIONS: Any = {"connect_timeout": "5s", "timeout": "60s", "allow_http": True}
"""An endpoint without TLS is what the operator wants."""
_RETRIES: Any = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}


class StorageUnavailableError(StoreUnavailableError):
    """The object storage cannot be read or written now. Trying again later may help."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    size: int
    changed_at: float


class Objects:
    """The objects below one address; keys are relative to it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._can_sign = not url.startswith("file:")
        self._store = _open(self.url)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="storage")

    async def put(self, key: str, content: bytes | Path) -> None:
        """Returns when it is there; a file is read in parts."""
        import obstore

        await self._run(obstore.put, self._store, key, content)

    async def create(self, key: str, content: bytes) -> None:
        """Put an object where there is none; what is there stays. A storage that cannot do that
        puts it in any case, so read afterwards what is there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        def put() -> None:
            try:
                obstore.put(self._store, key, content, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return
            except (NotSupportedError, NotImplementedError):
                obstore.put(self._store, key, content)

        await self._run(put)

    async def get(self, key: str) -> bytes | None:
        """None when there is none."""
        import obstore

        def read() -> bytes:
            return bytes(obstore.get(self._store, key).bytes())

        return await self._run(_or_none, read)

    async def fetch(self, prefix: str, files: Mapping[str, FileRecord], folder: Path) -> None:
        """Make a new folder of the objects below a prefix; all are what they were, or there is no
        folder."""

        def write() -> None:
            with disk.new_folder(folder) as draft:
                for name, expected in files.items():
                    disk.create_folder((draft / name).parent)
                    found = _or_none(
                        partial(disk.write_file, draft / name, self._pieces(prefix + name))
                    )
                    if found != expected:
                        fault = "missing" if found is None else "damaged: its checksum differs"
                        raise StoreDamagedError(f"{prefix}{name} in {self.url} is {fault}")

        await self._run(write)

    async def download(self, key: str, file: Path) -> FileRecord | None:
        """Write an object to a file in an existing folder; None when there is no such object."""
        return await self._run(_or_none, partial(disk.write_file, file, self._pieces(key)))

    async def describe(self, key: str) -> FileRecord | None:
        """What an object holds now; None when there is none."""

        def read() -> FileRecord:
            digest, size = hashlib.sha256(), 0
            for piece in self._pieces(key):
                digest.update(piece)
                size += len(piece)
            return FileRecord(size, digest.hexdigest())

        return await self._run(_or_none, read)

    async def find(self, prefix: str) -> list[StoredObject]:
        """Those whose keys begin with a prefix, which ends at a slash."""
        import obstore

        def read() -> list[StoredObject]:
            return [
                StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                for batch in obstore.list(self._store, prefix)
                for each in batch
            ]

        return await self._run(read)

    async def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        import obstore

        def delete() -> None:
            remaining = sorted(keys)
            for start in range(0, len(remaining), _DELETED_AT_ONCE):
                try:
                    obstore.delete(self._store, remaining[start : start + _DELETED_AT_ONCE])
                except FileNotFoundError:
                    # Of a folder; object storage does not mind.
                    for key in remaining[start : start + _DELETED_AT_ONCE]:
                        _or_none(partial(obstore.delete, self._store, key))

        if keys:
            await self._run(delete)

    async def sign(self, keys: Collection[str], seconds: int) -> list[str] | None:
        """URLs that anybody may read the objects from; None where the storage has no such thing."""
        import obstore

        if not self._can_sign:
            return None

        def sign() -> list[str]:
            return list(obstore.sign(self._store, "GET", list(keys), timedelta(seconds=seconds)))

        return await self._run(sign)

    def _pieces(self, key: str) -> Iterator[bytes]:
        import obstore

        for piece in obstore.get(self._store, key).stream(min_chunk_size=_PIECE_BYTES):
            yield bytes(piece)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        from obstore.exceptions import BaseError

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, function, *args)
        except (BaseError, OSError) as error:
            reason = str(error).partition("\n")[0]
            problem = f"the storage {self.url} cannot be used now: {reason}"
            raise StorageUnavailableError(problem) from error


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except FileNotFoundError:
        return None


def _open(url: str) -> Any:  # obstore's union of stores, an extra
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError:
        line = extras.install_line("storage")
        raise ValidationError(f"{url} needs the extra `storage`: {line}", "storage") from None
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return LocalStore(Path("/") / rest, mkdir=True)
    try:
        return from_url(url, client_options=_OPTIONS, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValidationError(f"{url} cannot be opened: {reason}", "storage") from None
