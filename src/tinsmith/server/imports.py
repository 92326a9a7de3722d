"""Imports: an uploaded adapter becomes a checkpoint, whole or not at all.

The engine reads the upload, checks it and writes weights of our own form; then one commit enters
weights, run and checkpoint. Whatever a crash leaves before that commit has no record and is swept.
"""

from __future__ import annotations

import asyncio
import time

from tinsmith.engine.base import Failure, ImportedAdapter
from tinsmith.errors import EngineError, ValidationError
from tinsmith.server.checkpoints import (
    Checkpoints,
    audit_of,
    check_ttl,
    checkpoint_name,
    expiry,
    id_of,
)
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.metadata import MetadataRoom, size_of
from tinsmith.server.store.records import CheckpointRecord, ModelRecord, WeightsRecord
from tinsmith.server.store.store import Store
from tinsmith.server.uploads import Uploads
from tinsmith.server.weights import WeightsFolders, files_value
from tinsmith.types import AdamOptimizerConfig
from tinsmith.types.checkpoints import KIND_SEGMENTS
from tinsmith.types.imports import ImportWeightsRequest


class Imports:
    def __init__(
        self,
        store: Store,
        uploads: Uploads,
        weights: WeightsFolders,
        checkpoints: Checkpoints,
        engines: EnginePool,
        metadata: MetadataRoom,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._weights = weights
        self._checkpoints = checkpoints
        self._engines = engines
        self._metadata = metadata
        self._under_way: dict[tuple[str, str], asyncio.Task[CheckpointRecord]] = {}
        """By owner and upload. The task's name is the run that it makes."""

    async def run(self, owner: str, message: ImportWeightsRequest) -> CheckpointRecord:
        """The checkpoint of an upload; the same request again, meanwhile or later, gets the same
        one."""
        name = checkpoint_name(message.name, 0)
        check_ttl(message.ttl_seconds)
        run_id = f"import-{id_of(owner, message.to_wire())}"
        segment = next(s for s, kind in KIND_SEGMENTS.items() if kind == message.kind)
        checkpoint_id = f"{segment}/{name}"
        existing = await self._checkpoints.owned(run_id, checkpoint_id, owner)
        if existing is not None:
            return existing
        upload = owner, message.upload_id
        if upload not in self._under_way:
            # On its own, so that a client that goes away leaves nothing half done.
            importing = self._import(owner, run_id, checkpoint_id, message)
            task = self._under_way[upload] = asyncio.create_task(importing, name=run_id)
            task.add_done_callback(lambda _: self._under_way.pop(upload))
        under_way = self._under_way[upload]
        if under_way.get_name() != run_id:
            raise ValidationError(
                "this upload is just being imported by another request; an upload becomes one "
                "checkpoint, so send the files again under another id",
                "upload_id",
            )
        return await asyncio.shield(under_way)

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _import(
        self, owner: str, run_id: str, checkpoint_id: str, message: ImportWeightsRequest
    ) -> CheckpointRecord:
        async with self._metadata.taken(owner, size_of(message.user_metadata)):
            checkpoint = await self._made(owner, run_id, checkpoint_id, message)
        await self._uploads.discard(owner, message.upload_id)
        return checkpoint

    async def _made(
        self, owner: str, run_id: str, checkpoint_id: str, message: ImportWeightsRequest
    ) -> CheckpointRecord:
        source = await self._uploads.join(owner, message.upload_id, message.files)
        engine = await self._engines.first()
        async with self._weights.new() as (weights_id, folder):
            imported = await engine.import_adapter(message.base_model, source, folder, message.kind)
        if isinstance(imported, Failure):
            if imported.category == "server":
                raise EngineError(imported.message)
            await self._uploads.discard(owner, message.upload_id)
            raise ValidationError(imported.message)
        return await self._enter(owner, run_id, checkpoint_id, message, weights_id, imported)

    async def _enter(
        self,
        owner: str,
        run_id: str,
        checkpoint_id: str,
        message: ImportWeightsRequest,
        weights_id: str,
        imported: ImportedAdapter,
    ) -> CheckpointRecord:
        at = time.time()
        lora, optimizer = imported.lora.to_wire(), AdamOptimizerConfig().to_wire()
        model = ModelRecord(
            model_id=run_id,
            session_id=None,
            model_seq_id=None,
            owner=owner,
            base_model=message.base_model,
            lora=lora,
            optimizer=optimizer,
            created_at=at,
            last_request_at=at,
        )
        weights = WeightsRecord(
            weights_id=weights_id,
            kind=message.kind,
            base_model=message.base_model,
            lora=lora,
            optimizer=optimizer,
            size_bytes=imported.size_bytes,
            created_at=at,
            files=files_value(imported.files),
        )
        checkpoint = CheckpointRecord(
            model_id=run_id,
            checkpoint_id=checkpoint_id,
            owner=owner,
            checkpoint_type=message.kind,
            weights_id=weights_id,
            size_bytes=imported.size_bytes,
            created_at=at,
            user_metadata=message.user_metadata,
            expires_at=expiry(message.ttl_seconds, at),
        )
        audit = audit_of(checkpoint, "checkpoint_imported")
        try:
            await self._store.checkpoints.add(checkpoint, model, audit, weights)
        except BaseException:
            await self._weights.discard(weights_id)
            raise
        return checkpoint
