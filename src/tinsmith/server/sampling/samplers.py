"""Samplers, which clients know as sampling sessions.

Several may share one folder of weights. Which weights are in the engine is the affair of `loaded`.
"""

from __future__ import annotations

from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.store.store import Remembered, Store

_MAX_RECORDS = 10_000
"""Samplers kept in memory; others are read from the store again."""


class Samplers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._records = Remembered(store.samplers.get, _MAX_RECORDS)

    async def get(self, sampler_id: str, owner: str) -> SamplerRecord | None:
        """The owner's sampler; None when there is none, or it is somebody else's."""
        return await self._records.get(sampler_id, lambda record: record.owner == owner)

    async def release(self, sampler: SamplerRecord) -> None:
        """Forget an unnamed sampler whose only client is gone."""
        if await self._store.samplers.release(sampler.sampler_id):
            self._records.forget(sampler.sampler_id)

    async def forget(self, session_id: str) -> None:
        """Forget all samplers of a session."""
        await self._store.samplers.forget(session_id)
        self._records.changed(lambda _, record: record.session_id == session_id)

    async def create(self, record: SamplerRecord) -> SamplerRecord | None:
        """The sampler; None when its weights were deleted since they were found."""
        return await self._store.samplers.add(record)
