"""Weights: where they are written and read, and what becomes of those that nothing refers to.

Their name is an id of ours, never something a client chose, so nothing can point outside. Where
the bytes are kept is the storage's business. What nothing refers to goes: to the trash where
somebody may want it back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tinsmith.disk import FileRecord
from tinsmith.engine.base import SavedAdapter, SavedKind
from tinsmith.server.storage.base import Storage
from tinsmith.server.store.errors import StoreDamagedError, StoreUnavailableError
from tinsmith.server.store.records import ModelRecord, WeightsRecord
from tinsmith.server.store.store import Store

logger = logging.getLogger(__name__)

_STRAY_SECONDS = 3600.0
"""Weights without a record that are older than this are not about to get one."""


class WeightsFolders:
    def __init__(self, storage: Storage, store: Store) -> None:
        self._storage = storage
        self._store = store
        self._writing: set[str] = set()
        self._looked_at = -_STRAY_SECONDS
        """When what is in the storage was last looked through, on the monotonic clock."""

    @contextlib.asynccontextmanager
    async def new(self) -> AsyncIterator[tuple[str, Path]]:
        """A fresh id, and the folder (which does not exist yet) that belongs to it, for an engine
        to write before the context ends; then it is in the storage."""
        weights_id = uuid.uuid4().hex
        self._writing.add(weights_id)
        try:
            yield weights_id, self._storage.folder_for(weights_id)
            await self._storage.keep(weights_id)
        finally:
            self._writing.remove(weights_id)

    def reading(self, weights_id: str) -> AbstractAsyncContextManager[Path]:
        """The folder of weights, for as long as the context lasts. Raises `StoreDamagedError` when
        they are not what they were."""
        return self._storage.reading(weights_id, self._files_of)

    async def files(self, weights_id: str) -> list[str]:
        """The names of the files, relative to the folder; none when there are no such weights."""
        return await self._storage.files(weights_id, self._files_of)

    async def _files_of(self, weights_id: str) -> Mapping[str, FileRecord]:
        record = await self._store.weights.get(weights_id)
        if record is None:
            raise StoreDamagedError(f"there are no weights {weights_id} any more")
        return record.file_records

    async def discard(self, weights_id: str) -> None:
        """Delete weights that were just written and never got a record."""
        await self._storage.discard([weights_id])

    async def sweep(self) -> None:
        """Let go of the weights that nothing refers to any more.

        Those of deleted checkpoints go to the trash. The rest never had a name that a user knows.
        """
        stray = await self._store.weights.unreferenced()
        if not stray:
            return
        try:
            # In this order: when the record is gone, the trash has the name.
            announced = await self._storage.announce(stray)
            gone = await self._store.weights.forget([each.weights_id for each in stray])
            await self._storage.let_go(set(gone), stray, announced)
        except StoreUnavailableError as error:
            logger.warning(
                "%d unused weights could not be removed and stay for now: %s", len(stray), error
            )

    async def sweep_unknown(self, *, is_start: bool = False) -> None:
        """Put what has no record into the trash: a save or deletion did not end, or worse.

        At the start of the one server of a folder all of it is stray. Later, or where others write
        too, what is new may be about to get its record; and a request may wait for it in the
        folder as long as the store is away.
        """
        is_alone, now = not self._storage.is_shared, time.monotonic()
        if not is_alone and now - self._looked_at < _STRAY_SECONDS:
            return  # looking through a large storage takes thousands of requests
        self._looked_at = now
        min_age_seconds = 0.0 if is_start and is_alone else _STRAY_SECONDS
        here = await self._storage.names(time.time() - min_age_seconds)
        if is_alone and not is_start:
            here = {name for name in here if "." not in name}
        if here:
            # In this order: another server that takes over meanwhile has written none of them.
            await self._store.confirm()
            await self._storage.put_in_trash(here - await self._store.file_names())

    async def sweep_drafts(self) -> None:
        """Delete what an engine was writing when it died, and nothing that another is writing."""
        await self._storage.sweep_drafts(self._writing, self._store.confirm)


def weights_record(
    weights_id: str, model: ModelRecord, kind: SavedKind, info: SavedAdapter, at: float
) -> WeightsRecord:
    return WeightsRecord(
        weights_id=weights_id,
        kind=kind,
        base_model=model.base_model,
        lora=model.lora,
        optimizer=model.optimizer,
        size_bytes=info.size_bytes,
        created_at=at,
        files=files_value(info.files),
    )


def files_value(files: Mapping[str, FileRecord]) -> dict[str, dict[str, int | str]]:
    """Files as their record has them."""
    return {name: dataclasses.asdict(record) for name, record in files.items()}
