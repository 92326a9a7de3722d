"""Folders of weights in the data folder.

A folder's name is an id of ours, never something a client chose, so nothing can point outside.
Folders that nothing refers to go: to the trash where somebody may want them back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinsmith import disk
from tinsmith.engine.base import SnapshotInfo, SnapshotKind
from tinsmith.server.store.records import CheckpointRecord, ModelRecord, WeightsRecord
from tinsmith.server.store.store import Store
from tinsmith.server.trash import Trash, TrashEntry

logger = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")

_STRAY_SECONDS = 3600.0
"""Age at which a folder without a record can no longer be one that is about to get one."""


class WeightsFolders:
    def __init__(self, root: Path, store: Store, trash: Trash) -> None:
        self._root = root
        self._store = store
        self._trash = trash
        self._moving = threading.Lock()
        self._writing: set[str] = set()
        disk.create_folder(root)

    @contextlib.contextmanager
    def new(self) -> Iterator[tuple[str, Path]]:
        """A fresh id, and the folder (which does not exist yet) that belongs to it, for an engine
        to write before the context ends."""
        weights_id = uuid.uuid4().hex
        self._writing.add(weights_id)
        try:
            yield weights_id, self._root / weights_id
        finally:
            self._writing.remove(weights_id)

    def folder(self, weights_id: str) -> Path:
        return self._root / weights_id

    def files(self, weights_id: str) -> list[str]:
        """The names of the files, relative to the folder. Links are none: they lead elsewhere."""
        folder = self.folder(weights_id)
        if not _ID.fullmatch(weights_id) or folder.is_symlink():
            return []
        return sorted(
            str(file.relative_to(folder))
            for file in folder.rglob("*")
            if file.is_file() and not file.is_symlink()
        )

    async def discard(self, weights_id: str) -> None:
        """Delete weights that were just written and never got a record."""
        await asyncio.to_thread(self._delete, [self.folder(weights_id)])

    async def sweep(self) -> None:
        """Let go of the folders that nothing refers to any more.

        Those of deleted checkpoints go to the trash. The rest were never anybody's by name.
        """
        stray = await self._store.weights.unreferenced()
        if stray:
            # In this order: when the record is gone, the trash has the name.
            announced = await asyncio.to_thread(self._announce, stray)
            gone = await self._store.weights.forget([each.weights_id for each in stray])
            await asyncio.to_thread(self._let_go, set(gone), stray, announced)

    async def sweep_unknown(self, min_age_seconds: float = _STRAY_SECONDS) -> None:
        """Move folders without a record to the trash: a save or deletion did not end, or worse."""
        unknown = await asyncio.to_thread(self._old_folders, time.time() - min_age_seconds)
        if unknown:
            known = set(await self._store.weights.ids())
            strangers = [f for f in unknown if f.name not in known]
            await asyncio.to_thread(self._move_to_trash, strangers)

    async def sweep_drafts(self) -> None:
        """Delete what an engine was writing when it died, and nothing that another is writing."""
        drafts = await asyncio.to_thread(lambda: [*filter(disk.is_draft, self._root.iterdir())])
        if drafts:
            # Of another server's that has taken over meanwhile there is none among them.
            await self._store.confirm()
        writing = {disk.draft_of(self.folder(weights_id)) for weights_id in self._writing}
        await asyncio.to_thread(self._delete, [each for each in drafts if each not in writing])

    def _old_folders(self, changed_before: float) -> list[Path]:
        return [
            folder
            for folder in self._root.iterdir()
            if not disk.is_draft(folder) and folder.stat().st_mtime <= changed_before
        ]

    def _announce(self, stray: Sequence[WeightsRecord]) -> dict[str, TrashEntry]:
        """Write down what those were that somebody may want back; the entries by weights."""
        return {
            weights.weights_id: self._trash.announce(
                self.folder(weights.weights_id),
                f"{CheckpointRecord(**weights.deleted_checkpoint).tinker_path} was deleted",
                dataclasses.asdict(weights),
            )
            for weights in stray
            if weights.deleted_checkpoint is not None and self.folder(weights.weights_id).exists()
        }

    def _let_go(
        self, gone: set[str], stray: Sequence[WeightsRecord], announced: dict[str, TrashEntry]
    ) -> None:
        for weights_id in (each.weights_id for each in stray):
            entry = announced.get(weights_id)
            if entry is not None:
                self._take_in(entry, is_coming=weights_id in gone)
            elif weights_id in gone:
                self._delete([self.folder(weights_id)])

    def _take_in(self, entry: TrashEntry, *, is_coming: bool = True) -> None:
        """Move announced weights to the trash, unless another sweep was quicker."""
        folder = self.folder(entry.name)
        with self._moving:
            if is_coming and folder.exists():
                self._trash.take_in(entry, folder)
            else:
                self._trash.withdraw(entry)

    def _move_to_trash(self, strangers: list[Path]) -> None:
        announced = self._trash.announced()
        for folder in strangers:
            entry = announced.get(folder.name)
            if entry is None:
                entry = self._trash.announce(folder, "the store has no record of it")
            self._take_in(entry)

    def _delete(self, folders: list[Path]) -> None:
        for folder in folders:
            logger.info("deleting weights %s", folder.name)
            try:
                disk.discard_folder(folder)
            except OSError:
                logger.exception("%s could not be deleted; the next start will try again", folder)


def weights_record(
    weights_id: str, model: ModelRecord, kind: SnapshotKind, info: SnapshotInfo, at: float
) -> WeightsRecord:
    return WeightsRecord(
        weights_id=weights_id,
        kind=kind,
        base_model=model.base_model,
        lora=model.lora,
        optimizer=model.optimizer,
        size_bytes=info.size_bytes,
        created_at=at,
    )
