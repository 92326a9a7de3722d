"""Samplers: the records of sampling sessions.

Several may share one folder of weights. Which weights are in the engine is the affair of `loaded`.
"""

from __future__ import annotations

from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.store.store import Store

_MAX_RECORDS = 10_000
"""Samplers kept in memory; others are read from the store again."""


class Samplers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, SamplerRecord] = {}

    async def get(self, sampler_id: str, owner: str) -> SamplerRecord | None:
        """The owner's sampler; None when there is none, or it is somebody else's."""
        record = self._records.get(sampler_id) or await self._store.samplers.get(sampler_id)
        if record is None or record.owner != owner:
            return None
        # Used last, at the end: the first makes room.
        self._records.pop(sampler_id, None)
        self._records[sampler_id] = record
        if len(self._records) > _MAX_RECORDS:
            del self._records[next(iter(self._records))]
        return record

    async def release(self, sampler: SamplerRecord) -> None:
        """Forget an unnamed sampler whose only client is gone."""
        if await self._store.samplers.release(sampler.sampler_id):
            self._records.pop(sampler.sampler_id, None)

    async def forget(self, session_id: str) -> None:
        """Forget all samplers of a session."""
        await self._store.samplers.forget(session_id)
        kept = {k: each for k, each in self._records.items() if each.session_id != session_id}
        self._records = kept

    async def create(self, record: SamplerRecord) -> SamplerRecord | None:
        """The sampler; None when its weights were deleted since they were found."""
        return await self._store.samplers.add(record)
