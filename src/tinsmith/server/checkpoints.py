"""Checkpoints: names for weights, who may read them, and when they go.

A checkpoint is a row; its weights lie in a folder whose name the client does not choose. So
overwriting, copying and deleting are changes of rows, and a folder goes when no row needs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tinsmith.errors import ValidationError
from tinsmith.server.encryption import ENCRYPTED
from tinsmith.server.metadata import MetadataRoom, size_of
from tinsmith.server.store.records import AuditRecord, CheckpointRecord, ModelRecord, WeightsRecord
from tinsmith.server.store.store import Store
from tinsmith.server.weights import WeightsFolders
from tinsmith.types import ParsedCheckpointTinkerPath
from tinsmith.wire import json

MIN_TTL_SECONDS = 3600
MAX_TTL_SECONDS = 10 * 365 * 24 * 3600

_NAME = re.compile(r"[A-Za-z0-9_.:@+=-]{1,200}")


def checkpoint_name(name: str | None, seq_id: int) -> str:
    """A client's name for a checkpoint; unnamed ones are called by their place in the log."""
    if name is None:
        return f"{seq_id:06d}"
    if not _NAME.fullmatch(name) or name.strip(".") == "":
        raise ValidationError(
            f"{name[:80]!r} cannot be a checkpoint's name: "
            "use 1 to 200 letters, digits, and the characters _ . : @ + = -",
            "path",
        )
    return name


def check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
        raise ValidationError(
            f"must be between {MIN_TTL_SECONDS} and {MAX_TTL_SECONDS} seconds, got {ttl_seconds}",
            "ttl_seconds",
        )


def expiry(ttl_seconds: int | None, created_at: float) -> float | None:
    return None if ttl_seconds is None else created_at + ttl_seconds


def id_of(owner: str, *request: object) -> str:
    """What an owner's request makes is called so: the same again finds it, and no other request or
    owner does, whatever they are called."""
    return hashlib.sha256(json.encode([owner, *request])).hexdigest()[:32]


class Checkpoints:
    def __init__(self, store: Store, weights: WeightsFolders, metadata: MetadataRoom) -> None:
        self._store = store
        self._weights = weights
        self._metadata = metadata

    async def readable(self, tinker_path: str, owner: str) -> CheckpointRecord:
        """The checkpoint at a path, as the owner may see it: it is theirs, or published."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        found = await self._store.checkpoints.get(parsed.training_run_id, parsed.checkpoint_id)
        seen = None if found is None else seen_by(owner, found)
        if seen is None:
            raise ValidationError(f"there is no checkpoint {tinker_path[:200]}")
        return seen

    async def owned(self, model_id: str, checkpoint_id: str, owner: str) -> CheckpointRecord | None:
        found = await self._store.checkpoints.get(model_id, checkpoint_id)
        if found is None or found.owner != owner or _is_expired(found):
            return None
        return found

    async def weights_of(self, checkpoint: CheckpointRecord) -> WeightsRecord:
        weights = await self._store.weights.get(checkpoint.weights_id)
        if weights is None:
            raise ValidationError(f"the weights of {checkpoint.tinker_path} are gone")
        if weights.lost is not None:
            raise ValidationError(
                f"the weights of {checkpoint.tinker_path} are lost: {weights.lost}; use another "
                "checkpoint of the run"
            )
        return weights

    async def loadable(self, checkpoint: CheckpointRecord) -> WeightsRecord:
        """The weights of a checkpoint that is to be loaded, or sampled from."""
        weights = await self.weights_of(checkpoint)
        if weights.kind == ENCRYPTED:
            raise ValidationError(
                f"{checkpoint.tinker_path} is encrypted: its files can be fetched but not loaded"
            )
        return weights

    async def publish(self, checkpoint: CheckpointRecord, is_public: bool) -> None:
        event = "checkpoint_published" if is_public else "checkpoint_unpublished"
        await self._update(checkpoint, {"is_public": is_public}, audit_of(checkpoint, event))

    async def set_ttl(self, checkpoint: CheckpointRecord, ttl_seconds: int | None) -> None:
        check_ttl(ttl_seconds)
        await self._update(
            checkpoint,
            {"expires_at": expiry(ttl_seconds, time.time())},
            audit_of(checkpoint, "checkpoint_ttl_set", {"ttl_seconds": ttl_seconds}),
        )

    async def _update(
        self, checkpoint: CheckpointRecord, values: dict[str, Any], audit: AuditRecord
    ) -> None:
        if not await self._store.checkpoints.update(checkpoint, values, audit):
            raise ValidationError(
                f"{checkpoint.tinker_path} was deleted or saved again meanwhile; nothing changed"
            )

    async def delete(self, checkpoint: CheckpointRecord, event: str = "checkpoint_deleted") -> None:
        """Delete this checkpoint; one that was saved under its name since it was read stays."""
        await self._store.checkpoints.delete(checkpoint, audit_of(checkpoint, event))
        await self._weights.sweep()

    async def delete_expired(self) -> list[CheckpointRecord]:
        """Those that were deleted."""
        expired = list(await self._store.checkpoints.expired(time.time()))
        for checkpoint in expired:
            await self.delete(checkpoint, "checkpoint_expired")
        return expired

    async def copy(
        self,
        source: CheckpointRecord,
        owner: str,
        *,
        project_id: str | None,
        ttl_seconds: int | None,
        idempotency_key: str | None,
    ) -> CheckpointRecord:
        """A checkpoint of the owner's with the same weights, under a training run of its own.

        The same request with the same idempotency key again gives the same copy.
        """
        check_ttl(ttl_seconds)
        request = idempotency_key or uuid.uuid4().hex
        copy_id = f"copy-{id_of(owner, request, source.tinker_path, project_id, ttl_seconds)}"
        existing = await self.owned(copy_id, source.checkpoint_id, owner)
        if existing is not None:
            return existing
        weights = await self.weights_of(source)
        at = time.time()
        model = ModelRecord(
            model_id=copy_id,
            session_id=None,
            model_seq_id=None,
            owner=owner,
            base_model=weights.base_model,
            lora=weights.lora,
            optimizer=weights.optimizer,
            project_id=project_id,
            created_at=at,
            last_request_at=at,
        )
        copied = dataclasses.replace(
            source,
            model_id=copy_id,
            owner=owner,
            created_at=at,
            is_public=False,
            expires_at=expiry(ttl_seconds, at),
        )
        details = {"source": source.tinker_path}
        audit = audit_of(copied, "checkpoint_copied", details)
        async with self._metadata.taken(owner, size_of(copied.user_metadata, project_id)):
            if not await self._store.checkpoints.add(copied, model, audit):
                raise ValidationError(
                    f"{source.tinker_path} was deleted meanwhile; nothing was copied"
                )
        return copied


def seen_by(reader: str, checkpoint: CheckpointRecord) -> CheckpointRecord | None:
    """What a reader may see of a checkpoint: its owner all of it, others nothing unless it is
    published, and then what it is but not what its owner wrote down about it."""
    if _is_expired(checkpoint):
        return None
    if checkpoint.owner == reader:
        return checkpoint
    return dataclasses.replace(checkpoint, user_metadata=None) if checkpoint.is_public else None


def run_seen_by(
    reader: str, model: ModelRecord, checkpoints: Sequence[CheckpointRecord]
) -> ModelRecord | None:
    """What a reader may see of a run, of whose checkpoints they see these. Others than the owner
    see that it is where a published checkpoint comes from, but not what has become of it since."""
    if model.owner == reader:
        return model
    if not checkpoints:
        return None
    return dataclasses.replace(
        model,
        user_metadata=None,
        is_corrupted=False,
        last_request_at=max(checkpoint.created_at for checkpoint in checkpoints),
    )


def _is_expired(checkpoint: CheckpointRecord) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= time.time()


def audit_of(
    checkpoint: CheckpointRecord, event: str, details: dict[str, Any] | None = None
) -> AuditRecord:
    return AuditRecord(
        owner=checkpoint.owner,
        at=time.time(),
        area="checkpoints",
        event=event,
        details=details or {},
        model_id=checkpoint.model_id,
        tinker_path=checkpoint.tinker_path,
    )
