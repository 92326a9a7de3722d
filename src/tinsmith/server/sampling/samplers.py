"""Samplers: sampling sessions, and which of their weights are in the engine.

A sampling session is a record; several may share one folder of weights, which the engine then
holds once, under the folder's id. Weights are loaded when first used (again), so a sampler lives
through the death of an engine or a restart, and the ones idle longest make room for others.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from tinsmith.engine.base import Engine, Failure
from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.store.store import Store
from tinsmith.server.weights import WeightsFolders


@dataclass(slots=True, eq=False)
class _Loaded:
    generation: int
    loading: asyncio.Task[Failure | None] | None
    """The load under way or done; None when the engine froze the weights itself."""
    num_jobs: int = 0
    last_used_at: float = field(default_factory=time.time)


class Samplers:
    def __init__(self, store: Store, weights: WeightsFolders, max_loaded: int) -> None:
        self._store = store
        self._weights = weights
        self._max_loaded = max_loaded
        self._records: dict[str, SamplerRecord] = {}
        self._loaded: dict[str, _Loaded] = {}

    async def get(self, sampler_id: str, owner: str) -> SamplerRecord | None:
        """The owner's sampler; None when there is none, or it is somebody else's."""
        record = self._records.get(sampler_id) or await self._store.samplers.get(sampler_id)
        if record is None or record.owner != owner:
            return None
        self._records.setdefault(sampler_id, record)
        return record

    async def create(self, record: SamplerRecord) -> SamplerRecord:
        return await self._store.samplers.add(record)

    async def acquire(
        self, engine: Engine, generation: int, sampler: SamplerRecord
    ) -> Failure | None:
        """Make sure the engine has the sampler's weights, and keep them there until `release`."""
        if sampler.weights_id is None:
            return None
        entry = self._loaded.get(sampler.weights_id)
        if entry is None or entry.generation != generation:
            loading = asyncio.create_task(
                self._load(engine, sampler.weights_id, sampler.base_model)
            )
            entry = self._loaded[sampler.weights_id] = _Loaded(generation, loading)
        entry.num_jobs += 1
        entry.last_used_at = time.time()
        if entry.loading is None:
            return None
        try:
            failure = await asyncio.shield(entry.loading)
        except BaseException:
            self._drop(sampler.weights_id, entry)
            raise
        if failure is not None:
            self._drop(sampler.weights_id, entry)
            return failure
        await self._make_room(engine, generation)
        return None

    def release(self, generation: int, sampler: SamplerRecord) -> None:
        entry = self._loaded.get(sampler.weights_id or "")
        if entry is not None and entry.generation == generation:
            entry.num_jobs -= 1

    async def _load(self, engine: Engine, weights_id: str, base_model: str) -> Failure | None:
        return await engine.load_sampler(weights_id, base_model, self._weights.folder(weights_id))

    def note_frozen(self, weights_id: str, generation: int) -> None:
        """The engine froze these weights itself; they need not be read from disk."""
        self._loaded[weights_id] = _Loaded(generation, None)

    async def _make_room(self, engine: Engine, generation: int) -> None:
        here = {k: e for k, e in self._loaded.items() if e.generation == generation}
        self._loaded = here
        idle = sorted((e.last_used_at, k) for k, e in here.items() if e.num_jobs <= 0)
        for _, weights_id in idle[: max(0, len(here) - self._max_loaded)]:
            del self._loaded[weights_id]
            await engine.unload_sampler(weights_id)

    def _drop(self, weights_id: str, entry: _Loaded) -> None:
        if self._loaded.get(weights_id) is entry:
            del self._loaded[weights_id]
