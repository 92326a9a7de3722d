"""Backups: a folder with the database as it was at one moment and every file that it names.

They are made beside a running server. What the data folder holds never changes once it has its
name; it only comes and goes. So the files are copied first, then the database, then the files that
are new in it; where one has gone meanwhile, this is done once more, which is quick by then. Of
object storage the same holds, and objects have in it the paths that files have in a folder.

A restored store is set back: programs that were at work know answers that it does not, so their
sessions have ended, and say why. They begin anew from a checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

from tinsmith import __version__, disk
from tinsmith.disk import FileRecord
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.storage import binding
from tinsmith.server.storage.bucket import place_of
from tinsmith.server.storage.objects import Objects
from tinsmith.server.storage.opening import open_blobs, open_storage
from tinsmith.server.store.blobs import BlobFiles
from tinsmith.server.store.copying import check_sqlite, copy_in, copy_out
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.store import Store

T = TypeVar("T")

_FACTS = "backup.json"
_FORM = 1
_ATTEMPTS = 20
_SHOWN = 10
"""How many faults of a backup are named."""

Tell = Callable[[int, int], None]
"""Called with how many of the weights and requests are done, and how many there are."""


class DamagedBackupError(TinkerError):
    """A backup is not whole; the message says what is wrong. Nothing is restored from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What a backup's folder says of itself."""

    made_at: float
    release: str
    files: dict[str, FileRecord]
    """By their path in the folder."""

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.made_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class _Source(Protocol):
    title: str

    def copy(self, name: str, target: DataFolder) -> dict[str, FileRecord]:
        """Copy weights or a request to the same paths; what was copied, by path. Raises
        `FileNotFoundError` when there are none."""
        ...


class _Folder:
    def __init__(self, root: Path) -> None:
        self.title = str(root)
        self._folder = DataFolder(root)

    def copy(self, name: str, target: DataFolder) -> dict[str, FileRecord]:
        folder = self._folder.weights / name
        files = [f for f in folder.rglob("*") if f.is_file()] if folder.is_dir() else []
        found = {}
        for file in files or [self._folder.blob(name)]:
            path = file.relative_to(self._folder.root)
            disk.create_folder((target.root / path).parent)
            found[path.as_posix()] = disk.copy_file(file, target.root / path)
        return found


class _Bucket:
    def __init__(self, url: str) -> None:
        self.title = url
        self._objects = Objects(url)

    def copy(self, name: str, target: DataFolder) -> dict[str, FileRecord]:
        return asyncio.run(self._copy(name, target))

    async def _copy(self, name: str, target: DataFolder) -> dict[str, FileRecord]:
        place = place_of(name)
        keys = [place]
        if place.endswith("/"):
            keys = [each.key for each in await self._objects.find(place)]
        found = {}
        for key in keys:
            disk.create_folder((target.root / key).parent)
            record = await self._objects.download(key, target.root / key)
            if record is None:
                break
            found[key] = record
        if not keys or len(found) < len(keys):
            raise FileNotFoundError(f"{place} in {self.title}")
        return found


def _tell_nobody(done: int, total: int) -> None:
    pass


def create(config: ServerConfig, to: Path, tell: Tell = _tell_nobody) -> Backup:
    """Copy a server's store, and its data folder or object storage, to a new folder, whether or not
    the server runs."""
    source: _Source = _Folder(config.data_dir)
    if config.storage is not None:
        source = _Bucket(config.storage)
    url, blobs = _url(config, DataFolder(config.data_dir)), open_blobs(config)
    with disk.new_folder(to) as draft:
        draft.chmod(0o700)
        target = DataFolder(draft)
        disk.create_folder(target.weights)
        disk.create_folder(target.blobs)
        copied: dict[str, dict[str, FileRecord]] = {}
        for _ in range(_ATTEMPTS):
            _copy(source, target, _names(url, blobs), copied, tell)
            made_at = time.time()
            disk.discard_file(target.database)
            copy_out(url, target.database)
            named = _names(sqlite_url(target.database), target.blobs)
            _copy(source, target, named, copied, tell)
            # A folder's record goes before its files do: what still has one was whole.
            known = _names(url, blobs)
            for name in set(copied) - (known & named):
                disk.discard_folder(target.weights / name)
                disk.discard_file(target.blob(name))
                del copied[name]
            missing = named - set(copied)
            if not missing:
                break
        else:
            raise ValidationError(
                f"{len(missing)} of the things that the database names are not in {source.title} "
                f"(one is {min(missing)}), so the backup would not be complete"
            )
        files = {path: record for found in copied.values() for path, record in found.items()}
        disk.sync_file(target.database)
        files[target.database.name] = disk.describe_file(target.database)
        backup = Backup(made_at=made_at, release=__version__, files=files)
        facts = {"form": _FORM, **dataclasses.asdict(backup)}
        disk.publish_file(draft / _FACTS, json.dumps(facts, indent=1).encode())
    return backup


def verify(folder: Path) -> Backup:
    """Read every byte of a backup; raises `DamagedBackupError` unless it is what was written."""
    backup = read(folder)
    faults = [fault for path in sorted(backup.files) if (fault := _fault(folder, path, backup))]
    database = DataFolder(folder).database
    if not faults:
        faults += [f"{database.name}: {problem}" for problem in check_sqlite(database)]
    if faults:
        shown = "; ".join(faults[:_SHOWN])
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise DamagedBackupError(f"the backup {folder} is damaged: {shown}{more}")
    return backup


def restore(folder: Path, config: ServerConfig) -> Backup:
    """Make a data folder, and fill an empty Postgres and an empty object storage where they are
    given, from a whole backup."""
    backup = verify(folder)
    reason = (
        f"the service was restored from a backup of {backup.moment}, and this run was set back to "
        "that moment; begin a new one from a checkpoint"
    )
    with disk.new_folder(config.data_dir) as draft:
        draft.chmod(0o700)
        target = DataFolder(draft)
        place = dataclasses.replace(config, data_dir=draft)
        if config.storage is not None:
            asyncio.run(_upload(place, folder, backup))
        for path, record in backup.files.items():
            if config.storage is not None and path != target.database.name:
                continue
            disk.create_folder((draft / path).parent)
            if disk.copy_file(folder / path, draft / path) != record:
                raise DamagedBackupError(f"{path} changed while it was read")
        database, blobs = sqlite_url(target.database), open_blobs(place)
        asyncio.run(_with_store(database, blobs, lambda store: store.set_back(reason)))
        if config.database_url is not None:
            copy_in(target.database, config.database_url)
            disk.discard_file(target.database)

        async def bind(store: Store) -> None:
            await binding.adopt(open_storage(place), store)

        asyncio.run(_with_store(_url(config, target), blobs, bind))
    return backup


async def _upload(config: ServerConfig, folder: Path, backup: Backup) -> None:
    """Fill an empty place in object storage."""
    assert config.storage is not None
    storage = open_storage(config)
    if await storage.identity() is not None or await storage.names():
        raise ValidationError(
            f"{config.storage} is not empty; restore to a place where there is nothing", "storage"
        )
    objects = Objects(config.storage)
    for path in backup.files:
        if path != DataFolder(folder).database.name:
            await objects.put(path, folder / path)


def read(folder: Path) -> Backup:
    """What a backup says of itself; its files are not looked at."""
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        form = facts.pop("form")
        if form != _FORM:
            raise ValidationError(f"the backup {folder} has format {form}; a later release made it")
        files = {path: FileRecord(**record) for path, record in facts.pop("files").items()}
        return Backup(files=files, **facts)
    except FileNotFoundError:
        raise ValidationError(f"{folder} is not a backup: it has no {_FACTS}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedBackupError(f"{folder / _FACTS} is damaged: {error}") from None


def _names(url: str, blobs: Path | BlobFiles) -> set[str]:
    """The weights and requests that a database names."""

    async def ask(store: Store) -> set[str]:
        return {*await store.weights.ids(), *await store.log.payload_names()}

    return asyncio.run(_with_store(url, blobs, ask))


async def _with_store(url: str, blobs: Path | BlobFiles, use: Callable[[Store], Awaitable[T]]) -> T:
    store = Store(url, blobs)
    try:
        return await use(store)
    finally:
        await store.close()


def _copy(
    source: _Source,
    target: DataFolder,
    names: set[str],
    copied: dict[str, dict[str, FileRecord]],
    tell: Tell,
) -> None:
    """Copy what is there of `names` and not in `copied` yet."""
    for name in sorted(names - set(copied)):
        try:
            copied[name] = source.copy(name, target)
        except FileNotFoundError:
            disk.discard_folder(target.weights / name)
        tell(len(copied), len(names | set(copied)))


def _fault(folder: Path, path: str, backup: Backup) -> str | None:
    if ".." in Path(path).parts or Path(path).is_absolute():
        return f"{path!r} lies outside"
    try:
        found = disk.describe_file(folder / path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if found.size != backup.files[path].size:
        return f"{path} has {found.size} bytes instead of {backup.files[path].size}"
    return None if found == backup.files[path] else f"{path}: its checksum differs"


def _url(config: ServerConfig, folder: DataFolder) -> str:
    return config.database_url or sqlite_url(folder.database)
