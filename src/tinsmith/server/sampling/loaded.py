"""Frozen weights in the engine: the one place that loads, freezes, holds and unloads them.

The engine holds at most so many at a time. A job holds its weights while it runs, and held weights
stay; the ones idle longest make room for others. When all are held, a job that needs others waits:
the owner with the most gives one up as soon as the jobs on it are done, and new jobs on that one
wait in turn, so a place becomes free however busy the engine is. There are fewer places while
adapters take more of the engine's memory than their share.

No waiter owns what it waits for. Loading belongs to the engine's list, and goes on when all its
waiters are cancelled: others may come to wait for it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.engine.base import Engine, Failure, Health
from tinsmith.errors import EngineError
from tinsmith.server.store.errors import StoreDamagedError


class LoadedSamplers:
    """The list of a slot's present engine; a new engine begins with an empty one."""

    def __init__(
        self, reading: Callable[[str], AbstractAsyncContextManager[Path]], max_loaded: int
    ) -> None:
        """`reading` gives the folder of weights for as long as they are read."""
        self._reading = reading
        self._max_loaded = max(1, max_loaded)
        self._generation = 0
        self._places = _Places(self._max_loaded)

    def __len__(self) -> int:
        return len(self._places.loaded)

    def has(self, weights_id: str) -> bool:
        """Whether these weights are in the engine, or being loaded."""
        return weights_id in self._places.loaded

    def heed(self, health: Health) -> None:
        """Give up a place while adapters exceed their share of memory and frozen ones, which can be
        read from disk again, have more than half of it; otherwise add one."""
        limit = health.adapter_limit_bytes
        is_full = 0 < limit < health.adapter_bytes and 2 * health.sampler_bytes > limit
        self._places.resize(-1 if is_full else 1)

    @contextlib.asynccontextmanager
    async def hold(
        self, engine: Engine, generation: int, weights_id: str, base_model: str, owner: str
    ) -> AsyncIterator[Failure | None]:
        """Keep weights in the engine for as long as the context lasts; loads them first if need be.

        Gives the reason when they cannot be loaded.
        """
        places = self._places_of(generation)
        loaded = await places.acquire(
            weights_id,
            owner,
            lambda: self._load(engine, weights_id, base_model),
            lambda: engine.unload_sampler(weights_id),
        )
        try:
            yield await asyncio.shield(loaded.ready)
        finally:
            places.release(loaded)

    async def _load(self, engine: Engine, weights_id: str, base_model: str) -> Failure | None:
        try:
            async with self._reading(weights_id) as folder:
                return await engine.load_sampler(weights_id, base_model, folder)
        except StoreDamagedError as error:
            return Failure(str(error), "server")

    async def freeze(
        self, engine: Engine, generation: int, adapter_id: str, weights_id: str, owner: str
    ) -> None:
        """Copy an adapter's weights into a sampler, unless every place is held.

        This only saves the first job on them from reading the file, so it waits for no job, and its
        failure fails none.
        """
        loaded = self._places_of(generation).add_idle(
            weights_id,
            owner,
            lambda: engine.freeze(adapter_id, weights_id),
            lambda: engine.unload_sampler(weights_id),
        )
        if loaded is not None:
            await asyncio.shield(loaded.ready)

    def _places_of(self, generation: int) -> _Places:
        if generation > self._generation:
            self._generation, self._places = generation, _Places(self._max_loaded)
        # A caller that still works with an engine that is gone hears so from the engine.
        return self._places if generation == self._generation else _Places(self._max_loaded)


Load = Callable[[], Coroutine[Any, Any, Failure | None]]
Unload = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class _Loaded:
    weights_id: str
    owner: str
    ready: asyncio.Task[Failure | None]
    """The load or freeze under way or done."""
    unload: Unload
    is_there: bool = False
    num_jobs: int = 0
    is_promised: bool = False
    """Whether somebody waits for this place: no further job may hold it."""
    unloading: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self.is_there and not self.num_jobs and self.unloading is None


@dataclass(slots=True, eq=False)
class _Wanted:
    """Weights that wait for a place, and the jobs that wait for them."""

    owner: str
    load: Load
    unload: Unload
    waiters: list[asyncio.Future[_Loaded]] = field(default_factory=list)


class _Places:
    """The places of one engine."""

    def __init__(self, max_loaded: int) -> None:
        self._max_loaded = max_loaded
        self._num_places = max_loaded
        """Those that there are at present."""
        self.loaded: dict[str, _Loaded] = {}
        """What takes a place, those being loaded and unloaded too; idle longest first."""
        self._wanted: dict[str, _Wanted] = {}

    async def acquire(self, weights_id: str, owner: str, load: Load, unload: Unload) -> _Loaded:
        """A held place with these weights, or with their loading under way."""
        loaded = self.loaded.get(weights_id)
        if loaded is not None and not loaded.is_promised and loaded.unloading is None:
            loaded.num_jobs += 1
            return loaded
        wanted = self._wanted.setdefault(weights_id, _Wanted(owner, load, unload))
        waiter: asyncio.Future[_Loaded] = asyncio.get_running_loop().create_future()
        wanted.waiters.append(waiter)
        self._settle()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(waiter.result())
            else:
                wanted.waiters.remove(waiter)
                if not wanted.waiters and self._wanted.get(weights_id) is wanted:
                    del self._wanted[weights_id]
                self._settle()
            raise

    def release(self, loaded: _Loaded) -> None:
        loaded.num_jobs -= 1
        if self.loaded.get(loaded.weights_id) is loaded:
            # To the end of the list: it was used last.
            self.loaded[loaded.weights_id] = self.loaded.pop(loaded.weights_id)
        self._settle()

    def add_idle(self, weights_id: str, owner: str, load: Load, unload: Unload) -> _Loaded | None:
        """Weights that nobody waits for; None when that would take another's place."""
        before: asyncio.Task[None] | None = None
        if self._wanted or weights_id in self.loaded:
            return None
        if len(self.loaded) >= self._num_places:
            idle = next((each for each in self.loaded.values() if each.is_idle), None)
            if idle is None:
                return None
            before = self._unload(idle)
        return self._load(weights_id, owner, load, unload, before)

    def resize(self, change: int) -> None:
        """One place more or less; those idle longest leave where there are too few."""
        taken = min(self._num_places, len(self.loaded)) if change < 0 else self._num_places
        self._num_places = min(self._max_loaded, max(1, taken + change))
        staying = [each for each in self._list() if each.unloading is None]
        idle = [each for each in staying if each.is_idle]
        for each in idle[: max(0, len(staying) - self._num_places)]:
            self._unload(each)
        self._settle()

    def _settle(self) -> None:
        """Give free places to those who wait, and make sure that enough places become free."""
        self._take_back_promises()
        while len(self.loaded) < self._num_places and (weights_id := self._next_wanted()):
            wanted = self._wanted.pop(weights_id)
            loaded = self._load(weights_id, wanted.owner, wanted.load, wanted.unload)
            _admit(wanted, loaded)
        num_leaving = sum(each.is_promised or each.unloading is not None for each in self._list())
        for _ in range(self._num_homeless() - num_leaving):
            if (leaving := self._next_to_leave()) is None:
                break
            leaving.is_promised = True
        for each in self._list():
            if each.is_promised and each.is_idle:
                self._unload(each)

    def _list(self) -> list[_Loaded]:
        return list(self.loaded.values())

    def _num_homeless(self) -> int:
        return sum(weights_id not in self.loaded for weights_id in self._wanted)

    def _take_back_promises(self) -> None:
        """Places that were to go to jobs which have left since stay in use."""
        promised = [each for each in self._list() if each.is_promised and each.unloading is None]
        num_unloading = sum(each.unloading is not None for each in self._list())
        needed = max(0, self._num_homeless() - num_unloading)
        for each in promised[needed:]:
            each.is_promised = False
            wanted = self._wanted.pop(each.weights_id, None)
            if wanted is not None:
                _admit(wanted, each)

    def _next_wanted(self) -> str | None:
        """Of those that can be loaded now: of the owner with the fewest, the one that came first.

        Weights that are being unloaded must be gone before they can come back.
        """
        held = Counter(each.owner for each in self.loaded.values())
        homeless = [key for key in self._wanted if key not in self.loaded]
        return min(homeless, key=lambda key: held[self._wanted[key].owner], default=None)

    def _next_to_leave(self) -> _Loaded | None:
        """The one idle longest; when none is idle, one of the owner who holds most."""
        staying = [e for e in self._list() if not e.is_promised and e.unloading is None]
        idle = next((each for each in staying if each.is_idle), None)
        if idle is not None:
            return idle
        held = Counter(each.owner for each in staying)
        return max(staying, key=lambda each: held[each.owner], default=None)

    def _load(
        self,
        weights_id: str,
        owner: str,
        load: Load,
        unload: Unload,
        before: asyncio.Task[None] | None = None,
    ) -> _Loaded:
        async def work() -> Failure | None:
            if before is not None:
                await before
            return await load()

        ready = asyncio.create_task(work())
        loaded = self.loaded[weights_id] = _Loaded(weights_id, owner, ready, unload)
        ready.add_done_callback(lambda _: self._end_load(loaded))
        return loaded

    def _end_load(self, loaded: _Loaded) -> None:
        task = loaded.ready
        if not task.cancelled() and task.exception() is None and task.result() is None:
            loaded.is_there = True
        else:
            del self.loaded[loaded.weights_id]
        self._settle()

    def _unload(self, loaded: _Loaded) -> asyncio.Task[None]:
        async def work() -> None:
            # An engine in trouble is noticed by those who need it; its weights are gone with it.
            with contextlib.suppress(EngineError):
                await loaded.unload()

        loaded.unloading = asyncio.create_task(work())
        loaded.unloading.add_done_callback(lambda _: self._end_unload(loaded))
        return loaded.unloading

    def _end_unload(self, loaded: _Loaded) -> None:
        del self.loaded[loaded.weights_id]
        self._settle()


def _admit(wanted: _Wanted, loaded: _Loaded) -> None:
    for waiter in wanted.waiters:
        if not waiter.done():
            loaded.num_jobs += 1
            waiter.set_result(loaded)
