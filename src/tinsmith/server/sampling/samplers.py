"""Samplers: the records of sampling sessions.

Several may share one folder of weights. Which weights are in the engine is the affair of `loaded`.
"""

from __future__ import annotations

from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.store.store import Store


class Samplers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[str, SamplerRecord] = {}

    async def get(self, sampler_id: str, owner: str) -> SamplerRecord | None:
        """The owner's sampler; None when there is none, or it is somebody else's."""
        record = self._records.get(sampler_id) or await self._store.samplers.get(sampler_id)
        if record is None or record.owner != owner:
            return None
        self._records.setdefault(sampler_id, record)
        return record

    async def create(self, record: SamplerRecord) -> SamplerRecord:
        return await self._store.samplers.add(record)
