"""Object storage: weights, large requests and results as objects, with copies on this machine.

An engine writes weights to the cache; they are uploaded before anything names them, and fetched and
compared with their checksums before anybody reads them elsewhere. What is deleted stays where it
is, with a mark that says so: weights are in the trash when there is a mark and the store does not
know them. So no move can be cut short, and a server that is late or wrong costs a mark, not data.

    identity.json             which store this belongs to
    blobs/AB/NAME             requests and results, by the first two letters of their names
    weights/ID/FILE           weights
    trash/ENTRY.json          marks
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

from tinsmith import disk
from tinsmith.disk import FileRecord
from tinsmith.server.storage.base import Confirm, FilesOf, Names
from tinsmith.server.storage.cache import Cache
from tinsmith.server.storage.folder import STRANGER, is_weights, reason_of
from tinsmith.server.storage.objects import Objects, StorageUnavailableError, StoredObject
from tinsmith.server.store.errors import ForeignStoreError, StoreDamagedError
from tinsmith.server.store.records import (
    CheckpointRecord,
    IdentityRecord,
    NotedIdentity,
    WeightsRecord,
)
from tinsmith.server.trash import TrashEntry, beyond

logger = logging.getLogger(__name__)

_IDENTITY = "identity.json"
_TRASH = "trash/"


class BucketBlobs:
    """Requests and results as objects."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def write(self, name: str, data: bytes) -> None:
        await self._objects.put(place_of(name), data)

    async def read(self, name: str) -> bytes:
        data = await self._objects.get(place_of(name))
        if data is None:
            raise StoreDamagedError(f"file {name} is missing from {self._objects.url}")
        return data

    async def delete(self, names: Collection[str]) -> None:
        try:
            await self._objects.delete([place_of(name) for name in names])
        except StorageUnavailableError as error:
            # The store no longer knows them, so a later sweep finds them.
            logger.warning(
                "%d requests and results could not be deleted and stay for now: %s",
                len(names),
                error,
            )


class BucketStorage:
    is_shared = True

    def __init__(self, objects: Objects, cache: Cache, *, gives_urls: bool) -> None:
        """`gives_urls` says whether clients may be sent to the storage itself."""
        self.title = f"the storage {objects.url}"
        self._objects = objects
        self._cache = cache
        self._gives_urls = gives_urls
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._marks: dict[str, TrashEntry] = {}
        """Marks that were read before, by key; they never change."""

    # Weights

    def folder_for(self, weights_id: str) -> Path:
        return self._cache.folder(weights_id)

    async def keep(self, weights_id: str) -> None:
        with self._cache.held(weights_id) as folder:
            files = await asyncio.to_thread(_files_in, folder)
            try:
                for file in files:
                    key = f"{place_of(weights_id)}{file.relative_to(folder)}"
                    await self._objects.put(key, file)
            except BaseException:
                await self._cache.remove(weights_id)
                raise
        if files:
            await self._cache.add(weights_id)

    @contextlib.asynccontextmanager
    async def reading(self, weights_id: str, files_of: FilesOf) -> AsyncIterator[Path]:
        try:
            with self._cache.held(weights_id) as folder:
                if weights_id not in self._cache:
                    await self._fetch_once(weights_id, files_of)
                yield folder
        finally:
            await self._cache.make_room(0)

    async def _fetch_once(self, weights_id: str, files_of: FilesOf) -> None:
        if weights_id not in self._fetching:
            task = asyncio.create_task(self._fetch(weights_id, files_of))
            self._fetching[weights_id] = task
            task.add_done_callback(lambda _: self._fetching.pop(weights_id, None))
        # Others may wait for it too, and must not hear that this one has left.
        await asyncio.shield(self._fetching[weights_id])

    async def _fetch(self, weights_id: str, files_of: FilesOf) -> None:
        files = await files_of(weights_id)
        await self._cache.make_room(sum(file.size for file in files.values()))
        await self._objects.fetch(place_of(weights_id), files, self._cache.folder(weights_id))
        await self._cache.add(weights_id)

    async def files(self, weights_id: str, files_of: FilesOf) -> list[str]:
        try:
            return sorted(await files_of(weights_id))
        except StoreDamagedError:
            return []

    async def discard(self, weights_ids: Collection[str]) -> None:
        for weights_id in weights_ids:
            logger.info("deleting weights %s", weights_id)
            await self._cache.remove(weights_id)
            try:
                await self._delete(weights_id)
            except StorageUnavailableError as error:
                logger.warning(
                    "weights %s could not be deleted and stay for now: %s", weights_id, error
                )

    async def _delete(self, name: str) -> None:
        found = await self._objects.find(place_of(name)) if is_weights(name) else []
        await self._objects.delete([each.key for each in found] or [place_of(name)])

    async def sweep_drafts(self, writing: Collection[str], confirm: Confirm) -> None:
        await confirm()
        spared = {*writing, *self._fetching}
        await self._cache.sweep_drafts({disk.draft_of(self._cache.folder(name)) for name in spared})

    async def urls(
        self, weights_id: str, names: Collection[str], seconds: int
    ) -> dict[str, str] | None:
        if not self._gives_urls:
            return None
        ordered = sorted(names)
        signed = await self._objects.sign([f"{place_of(weights_id)}{n}" for n in ordered], seconds)
        return None if signed is None else dict(zip(ordered, signed, strict=True))

    # What is here

    async def names(self, changed_before: float | None = None) -> set[str]:
        changed_at: dict[str, float] = defaultdict(float)
        for name, each in await self._list():
            changed_at[name] = max(changed_at[name], each.changed_at)
        return {n for n, at in changed_at.items() if changed_before is None or at <= changed_before}

    async def sizes(self, names: Collection[str]) -> dict[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        for name, each in await self._list():
            sizes[name] += each.size
        return {name: sizes[name] for name in names if name in sizes}

    async def _list(self) -> list[tuple[str, StoredObject]]:
        """What has names of our form; other objects are left alone."""
        found = [
            (_name(each.key), each)
            for prefix in ("weights/", "blobs/")
            for each in await self._objects.find(prefix)
        ]
        return [(name, each) for name, each in found if each.key.startswith(place_of(name))]

    async def describe(self, name: str) -> dict[str, FileRecord]:
        place = place_of(name)
        keys = [each.key for each in await self._objects.find(place)]
        found = {key.removeprefix(place): await self._objects.describe(key) for key in keys}
        return {path: record for path, record in found.items() if record is not None}

    # The trash

    async def announce(self, stray: Sequence[WeightsRecord]) -> dict[str, TrashEntry]:
        return {
            weights.weights_id: await self._mark(
                weights.weights_id,
                reason_of(CheckpointRecord(**weights.deleted_checkpoint)),
                weights.size_bytes,
                dataclasses.asdict(weights),
            )
            for weights in stray
            if weights.deleted_checkpoint is not None
        }

    async def let_go(
        self, gone: set[str], stray: Sequence[WeightsRecord], announced: dict[str, TrashEntry]
    ) -> None:
        for weights_id in (each.weights_id for each in stray):
            if weights_id not in gone and weights_id in announced:
                await self._unmark([announced[weights_id]])
            elif weights_id in announced:
                await self._cache.remove(weights_id)
            elif weights_id in gone:
                await self.discard([weights_id])

    async def put_in_trash(self, names: Collection[str]) -> None:
        marked = {entry.name for entry in await self._all_marks()}
        unmarked = [name for name in names if name not in marked]
        sizes = await self.sizes(unmarked) if unmarked else {}
        for name in unmarked:
            await self._mark(name, STRANGER, sizes.get(name, 0))

    async def trashed(self, known: Names) -> list[TrashEntry]:
        marks = _newest(await self._all_marks())
        if not marks:
            return []
        in_store = set(await known())
        return [entry for entry in marks if entry.name not in in_store]

    async def take_out(self, entry: TrashEntry) -> None:
        await self._unmark([e for e in await self._all_marks() if e.name == entry.name])

    async def empty_trash(
        self, moved_before: float, max_owner_bytes: int | None, known: Names
    ) -> int:
        marks = await self._all_marks()
        newest = _newest(marks)
        leaving = {e.name for e in newest if e.moved_at < moved_before}
        if max_owner_bytes is not None:
            too_many = beyond(newest, max_owner_bytes)
            leaving |= {e.name for e in newest if e.entry_id in too_many}
        in_store = set(await known()) if leaving else set()
        for name in leaving - in_store:
            logger.info("deleting %s from the trash", name)
            await self._delete(name)
        await self._unmark([e for e in marks if e.name in leaving])
        return len(leaving - in_store)

    async def sweep_trash(self, confirm: Confirm) -> None:
        pass

    async def _mark(
        self, name: str, reason: str, size_bytes: int, weights: dict[str, Any] | None = None
    ) -> TrashEntry:
        entry = TrashEntry(
            entry_id=uuid.uuid4().hex[:12],
            name=name,
            moved_at=time.time(),
            reason=reason,
            size_bytes=size_bytes,
            weights=weights,
        )
        await self._objects.put(_mark_key(entry), json.dumps(dataclasses.asdict(entry)).encode())
        logger.info("marked %s as trash (%s): %s", name, entry.entry_id, reason)
        return entry

    async def _unmark(self, entries: Collection[TrashEntry]) -> None:
        await self._objects.delete([_mark_key(entry) for entry in entries])

    async def _all_marks(self) -> list[TrashEntry]:
        keys = [each.key for each in await self._objects.find(_TRASH)]
        self._marks = {key: self._marks[key] for key in keys if key in self._marks}
        for key in keys:
            if key not in self._marks and (facts := await self._objects.get(key)) is not None:
                self._marks[key] = TrashEntry(**json.loads(facts))
        return list(self._marks.values())

    # Which store it belongs to

    async def identity(self) -> NotedIdentity | None:
        facts = await self._objects.get(_IDENTITY)
        if facts is None:
            return None
        try:
            return NotedIdentity(**json.loads(facts))
        except (ValueError, TypeError) as error:
            raise ForeignStoreError(self.title, f"{_IDENTITY} is damaged ({error})") from None

    async def expect_epoch(self, epoch: int) -> None:
        """Whether the bucket is older than the store is not asked: several servers count up."""

    async def write_identity(self, identity: IdentityRecord) -> None:
        """Note how far the store has counted, unless a later epoch is there; refused where another
        store was first, which `check` may not have seen yet. Epoch 0 is a new identity."""
        facts = json.dumps(dataclasses.asdict(identity)).encode()
        noted = await self.identity()
        if noted is None:
            await self._objects.create(_IDENTITY, facts)
            noted = await self.identity()
        elif identity.epoch == 0:
            await self._objects.put(_IDENTITY, facts)
            return
        if noted is not None and noted.store_id != identity.store_id:
            raise ForeignStoreError(self.title, "it belongs to another database by now")
        if noted is None or noted.epoch < identity.epoch:
            await self._objects.put(_IDENTITY, facts)

    def note_position(self, position: int) -> None:
        """Written with the epoch, every minute: a request for each commit would cost too much."""


def place_of(name: str) -> str:
    """The key of a request or result, or what the keys of weights begin with."""
    return f"weights/{name}/" if is_weights(name) else f"blobs/{name[:2]}/{name}"


def _name(key: str) -> str:
    parts = key.split("/")
    return parts[1] if parts[0] == "weights" else parts[-1]


def _mark_key(entry: TrashEntry) -> str:
    return f"{_TRASH}{entry.entry_id}.json"


def _newest(marks: Collection[TrashEntry]) -> list[TrashEntry]:
    """The last mark of each name, the newest first. A sweep that was cut leaves one too many."""
    by_name = {e.name: e for e in sorted(marks, key=lambda e: e.moved_at)}
    return sorted(by_name.values(), key=lambda e: e.moved_at, reverse=True)


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
