"""When a live model's state is saved so that its log can be trimmed, and how.

A snapshot holds the weights, the optimizer's state and the pending gradients: everything that the
operations before it did. It is taken between two operations of the model. The one before it is
kept as well, with the log since then, in case the newest turns out damaged; what is older goes.
"""

from __future__ import annotations

import logging
import time
import zlib

from tinsmith.engine.base import Engine, Failure
from tinsmith.errors import TinkerError
from tinsmith.server.config import ServerConfig
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation
from tinsmith.server.store.store import Store
from tinsmith.server.weights import WeightsFolders, weights_record

logger = logging.getLogger(__name__)


class SnapshotError(TinkerError):
    """The engine is well but could not write the snapshot; the message says why."""


class Snapshots:
    def __init__(self, store: Store, weights: WeightsFolders, config: ServerConfig) -> None:
        self._store = store
        self._weights = weights
        self._config = config

    def note(self, model: LiveModel, operation: Operation, *, is_done: bool) -> None:
        """An operation of the model has ended."""
        model.operations_since_snapshot += 1
        model.bytes_since_snapshot += operation.record.payload_bytes
        if not (is_done and operation.kind.changes_model):
            return
        model.is_changed = True
        model.steps_since_snapshot += operation.is_step
        if model.oldest_since_snapshot is None:
            model.oldest_since_snapshot = time.time()

    def is_due(self, model: LiveModel) -> bool:
        if self._is_log_long(model):
            return True  # also of one that has not changed: its log is trimmed up to its snapshots
        return model.is_changed and (
            model.wants_snapshot
            or model.steps_since_snapshot >= self._config.snapshot_steps
            or self._is_old(model)
        )

    def _is_log_long(self, model: LiveModel) -> bool:
        return (
            model.bytes_since_snapshot >= self._config.snapshot_log_bytes
            or model.operations_since_snapshot >= self._config.snapshot_log_operations
        )

    def _is_old(self, model: LiveModel) -> bool:
        """Models that began together come due apart, so that the disk is never theirs alone."""
        if model.oldest_since_snapshot is None:
            return False
        age, most = time.time() - model.oldest_since_snapshot, self._config.snapshot_seconds
        if age < 0.5 * most:
            return False
        return age >= (0.5 + 0.5 * zlib.crc32(model.model_id.encode()) / 0xFFFFFFFF) * most

    def put_off(self, model: LiveModel) -> None:
        """One could not be taken: the next is due as if it had been, also for a model that is to
        leave."""
        model.unload_after = time.monotonic() + self._config.snapshot_seconds
        model.wants_snapshot = False
        model.oldest_since_snapshot = time.time()
        model.steps_since_snapshot = 0
        model.operations_since_snapshot = model.bytes_since_snapshot = 0

    async def take(self, engine: Engine, model: LiveModel) -> None:
        """Save the model as it is now. Nothing of it may be under way."""
        seq_id = model.queue.next_seq_id - 1
        await model.recorded()
        async with self._weights.new() as (weights_id, folder):
            info = await engine.save(model.model_id, folder, "exact")
        if isinstance(info, Failure):
            raise SnapshotError(f"no snapshot of {model.model_id} could be taken: {info.message}")
        record = weights_record(weights_id, model.record, "exact", info, time.time())
        await self._store.models.record_snapshot(model.model_id, seq_id, record)
        model.is_changed = model.wants_snapshot = False
        model.steps_since_snapshot = 0
        model.operations_since_snapshot = model.bytes_since_snapshot = 0
        model.oldest_since_snapshot = None
        logger.info("snapshot of %s at operation %d", model.model_id, seq_id)
        await self._weights.sweep()
