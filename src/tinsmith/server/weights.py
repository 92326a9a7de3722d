"""Folders of weights in the data folder.

A folder's name is an id of ours, never something a client chose, so nothing can point outside.
Folders that nothing refers to go: to the trash where somebody may want them back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from tinsmith import disk
from tinsmith.engine.base import SnapshotInfo, SnapshotKind
from tinsmith.server.store.records import CheckpointRecord, ModelRecord, WeightsRecord
from tinsmith.server.store.store import Store
from tinsmith.server.trash import Trash

logger = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")

_STRAY_SECONDS = 3600.0
"""Age at which a folder without a record can no longer be one that is about to get one."""


class WeightsFolders:
    def __init__(self, root: Path, store: Store, trash: Trash) -> None:
        self._root = root
        self._store = store
        self._trash = trash
        disk.create_folder(root)

    def new(self) -> tuple[str, Path]:
        """A fresh id, and the folder (which does not exist yet) that belongs to it."""
        weights_id = uuid.uuid4().hex
        return weights_id, self._root / weights_id

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
            gone = await self._store.weights.forget(stray)
            await asyncio.to_thread(self._let_go, gone)

    async def sweep_unknown(self, min_age_seconds: float = _STRAY_SECONDS) -> None:
        """Move folders without a record to the trash: a save did not end, or worse."""
        unknown = await asyncio.to_thread(self._old_folders, time.time() - min_age_seconds)
        if unknown:
            known = set(await self._store.weights.ids())
            strangers = [f for f in unknown if f.name not in known]
            await asyncio.to_thread(self._move_to_trash, strangers)

    async def sweep_drafts(self) -> None:
        """Delete what an engine was writing when it died. Only while no engine is at work."""
        drafts = await asyncio.to_thread(lambda: [*filter(disk.is_draft, self._root.iterdir())])
        await asyncio.to_thread(self._delete, drafts)

    def _old_folders(self, changed_before: float) -> list[Path]:
        return [
            folder
            for folder in self._root.iterdir()
            if not disk.is_draft(folder) and folder.stat().st_mtime <= changed_before
        ]

    def _let_go(self, gone: Sequence[WeightsRecord]) -> None:
        for weights in gone:
            folder = self.folder(weights.weights_id)
            if weights.deleted_checkpoint is None:
                self._delete([folder])
            elif folder.exists():
                name = CheckpointRecord(**weights.deleted_checkpoint).tinker_path
                self._trash.put(folder, f"{name} was deleted", dataclasses.asdict(weights))

    def _move_to_trash(self, folders: list[Path]) -> None:
        for folder in folders:
            self._trash.put(folder, "the store has no record of it")

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
