"""The data folder as storage: what an engine writes there is where it stays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from tinsmith import disk
from tinsmith.disk import FileRecord
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.storage.base import Confirm, FilesOf, Names
from tinsmith.server.store.records import (
    CheckpointRecord,
    IdentityRecord,
    NotedIdentity,
    WeightsRecord,
)
from tinsmith.server.trash import Trash, TrashEntry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ID = re.compile(r"[0-9a-f]{32}")
STRANGER = "the store has no record of it"


def is_weights(name: str) -> bool:
    """Whether a name is that of weights; those of requests and results have more to them."""
    return _ID.fullmatch(name) is not None


class FolderStorage:
    is_shared = False

    def __init__(self, folder: DataFolder) -> None:
        self.title = f"the data folder {folder.root}"
        disk.create_folder(folder.weights)
        self._folder = folder
        self._trash = Trash(folder.trash)
        self._moving = threading.Lock()
        self.note_position = folder.note_position

    def folder_for(self, weights_id: str) -> Path:
        return self._folder.weights / weights_id

    async def keep(self, weights_id: str) -> None:
        pass

    @contextlib.asynccontextmanager
    async def reading(self, weights_id: str, files_of: FilesOf) -> AsyncIterator[Path]:
        yield self.folder_for(weights_id)

    async def files(self, weights_id: str, files_of: FilesOf) -> list[str]:
        """Links do not count: they lead elsewhere."""
        folder = self.folder_for(weights_id)
        if not is_weights(weights_id) or folder.is_symlink():
            return []
        return sorted(
            str(file.relative_to(folder))
            for file in folder.rglob("*")
            if file.is_file() and not file.is_symlink()
        )

    async def discard(self, weights_ids: Collection[str]) -> None:
        await asyncio.to_thread(self._delete, map(self.folder_for, weights_ids))

    async def sweep_drafts(self, writing: Collection[str], confirm: Confirm) -> None:
        root = self._folder.weights
        drafts = await asyncio.to_thread(lambda: [*filter(disk.is_draft, root.iterdir())])
        if drafts:
            await confirm()
        spared = {disk.draft_of(self.folder_for(weights_id)) for weights_id in writing}
        await asyncio.to_thread(self._delete, [each for each in drafts if each not in spared])

    async def urls(
        self, weights_id: str, names: Collection[str], seconds: int
    ) -> dict[str, str] | None:
        return None

    async def names(self, changed_before: float | None = None) -> set[str]:
        return await asyncio.to_thread(self._folder.names, changed_before)

    async def sizes(self, names: Collection[str]) -> dict[str, int]:
        def measure() -> dict[str, int]:
            paths = {name: self._path(name) for name in names}
            return {name: disk.size_of(path) for name, path in paths.items() if path.exists()}

        return await asyncio.to_thread(measure)

    async def describe(self, name: str) -> dict[str, FileRecord]:
        def read() -> dict[str, FileRecord]:
            folder = self.folder_for(name)
            files = [file for file in folder.rglob("*") if file.is_file()]
            return {str(file.relative_to(folder)): disk.describe_file(file) for file in files}

        return await asyncio.to_thread(read)

    async def announce(self, stray: Sequence[WeightsRecord]) -> dict[str, TrashEntry]:
        def write() -> dict[str, TrashEntry]:
            return {
                weights.weights_id: self._trash.announce(
                    self.folder_for(weights.weights_id),
                    reason_of(CheckpointRecord(**weights.deleted_checkpoint)),
                    dataclasses.asdict(weights),
                )
                for weights in stray
                if weights.deleted_checkpoint is not None
                and self.folder_for(weights.weights_id).exists()
            }

        return await asyncio.to_thread(write)

    async def let_go(
        self, gone: set[str], stray: Sequence[WeightsRecord], announced: dict[str, TrashEntry]
    ) -> None:
        def move() -> None:
            for weights_id in (each.weights_id for each in stray):
                entry = announced.get(weights_id)
                if entry is not None:
                    self._take_in(entry, is_coming=weights_id in gone)
                elif weights_id in gone:
                    self._delete([self.folder_for(weights_id)])

        await asyncio.to_thread(move)

    async def put_in_trash(self, names: Collection[str]) -> None:
        def move() -> None:
            announced = self._trash.announced()
            for name in names:
                entry = announced.get(name) or self._trash.announce(self._path(name), STRANGER)
                self._take_in(entry)

        await asyncio.to_thread(move)

    async def trashed(self, known: Names) -> list[TrashEntry]:
        return await asyncio.to_thread(self._trash.entries)

    async def take_out(self, entry: TrashEntry) -> None:
        await asyncio.to_thread(self._trash.take_out, entry, self._path(entry.name))

    async def empty_trash(
        self, moved_before: float, max_owner_bytes: int | None, known: Names
    ) -> int:
        return await asyncio.to_thread(self._trash.empty, moved_before, max_owner_bytes)

    async def sweep_trash(self, confirm: Confirm) -> None:
        drafts = await asyncio.to_thread(self._folder.blob_drafts)
        if drafts:
            await confirm()
        for draft in drafts:
            await asyncio.to_thread(disk.discard_file, draft)
        await asyncio.to_thread(self._trash.sweep)

    async def identity(self) -> NotedIdentity | None:
        return self._folder.identity()

    async def expect_epoch(self, epoch: int) -> None:
        self._folder.expect_epoch(epoch)

    async def write_identity(self, identity: IdentityRecord) -> None:
        self._folder.write_identity(identity)

    def _path(self, name: str) -> Path:
        """Where something lies; a name that was put there by hand is taken for that of weights."""
        blob = self._folder.blob(name)
        return blob if not is_weights(name) and blob.exists() else self.folder_for(name)

    def _take_in(self, entry: TrashEntry, *, is_coming: bool = True) -> None:
        """Move what was announced to the trash, unless another sweep was quicker."""
        path = self._path(entry.name)
        with self._moving:
            if is_coming and path.exists():
                self._trash.take_in(entry, path)
            else:
                self._trash.withdraw(entry)

    def _delete(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            logger.info("deleting weights %s", folder.name)
            try:
                disk.discard_folder(folder)
            except OSError:
                logger.exception("%s could not be deleted; the next start will try again", folder)


def reason_of(deleted: CheckpointRecord) -> str:
    """Why weights of a checkpoint are in the trash."""
    return f"{deleted.tinker_path} was deleted"
