"""Uploaded losses as the engine takes them; those that were used last stay in memory.

To read a large graph takes as long as many passes, and a run uses one loss for all of its passes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from tinsmith.engine.base import CustomLoss
from tinsmith.server.store.losses import USE_SECONDS, CustomLosses
from tinsmith.server.store.records import CustomLossRecord
from tinsmith.types import CustomLossGraph, CustomLossInput

_KEPT_BYTES = 4 * 1024 * 1024
"""Of the definitions in memory, as JSON; as objects they take ten times as much."""


class UploadedLosses:
    def __init__(self, stored: CustomLosses, max_bytes: int = _KEPT_BYTES) -> None:
        self._stored = stored
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[CustomLossRecord, CustomLoss]] = OrderedDict()
        """By id, the one used last at the end."""
        self._num_bytes = 0
        self._num_sweeps = 0
        self._used_at: dict[str, float] = {}
        """Uses that were noted within the last `USE_SECONDS`, the earliest first."""

    async def get(self, loss_id: str, owner: str) -> CustomLoss | None:
        """A loss of this owner's."""
        if loss_id in self._kept:
            self._kept.move_to_end(loss_id)
            record, loss = self._kept[loss_id]
            return loss if record.owner == owner else None
        num_sweeps = self._num_sweeps
        found = await self._stored.get(loss_id)
        if found is None or found.owner != owner:
            return None
        loss = await asyncio.to_thread(_for_engine, found)
        # One that was deleted meanwhile may come again under its number, as another.
        if num_sweeps == self._num_sweeps:
            self._keep(found, loss)
        return loss

    async def note_use(self, loss_id: str, owner: str) -> None:
        """A pass of this owner's is about to be recorded; while it may run, its loss stays."""
        now = time.time()
        while self._used_at and next(iter(self._used_at.values())) <= now - USE_SECONDS:
            del self._used_at[next(iter(self._used_at))]
        if loss_id not in self._used_at and await self._stored.note_use(loss_id, owner, now):
            self._used_at[loss_id] = now

    async def delete_unused(self, before: float) -> None:
        # Of a use within the last hour the store may not know.
        before = min(before, time.time() - 2 * USE_SECONDS)
        if await self._stored.delete_unused(before):
            self._num_sweeps += 1
            self._kept.clear()
            self._used_at.clear()
            self._num_bytes = 0

    def _keep(self, record: CustomLossRecord, loss: CustomLoss) -> None:
        if record.loss_id in self._kept or record.num_bytes > self._max_bytes:
            return
        self._kept[record.loss_id] = record, loss
        self._num_bytes += record.num_bytes
        while self._num_bytes > self._max_bytes:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._num_bytes -= dropped.num_bytes


def _for_engine(record: CustomLossRecord) -> CustomLoss:
    return CustomLoss(
        inputs=tuple(CustomLossInput(**each) for each in record.definition["inputs"]),
        graph=CustomLossGraph(**record.definition["graph"]),
    )
