"""Models in and out of the engine: rebuilding them there, saving them, putting them on disk."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

from tinsmith.engine.base import Engine, Failure, Health
from tinsmith.errors import EngineError, TinkerError
from tinsmith.server.config import ServerConfig
from tinsmith.server.engines.slot import Slot
from tinsmith.server.operations.endings import Endings
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.recovery import RebuildError, Recovery
from tinsmith.server.operations.runner import Free
from tinsmith.server.operations.snapshots import Snapshots
from tinsmith.server.store.store import Store

logger = logging.getLogger(__name__)


class ModelWork:
    """Work on one model that is no operation of its log."""

    def __init__(self, model: LiveModel, free: Free) -> None:
        self.model = model
        self.models = [model]
        self._free = free

    def engine_died(self, error: EngineError) -> None:
        """The model is rebuilt when it is wanted."""

    def waited(self, error: TinkerError) -> None:
        """It is tried again as long as it is due."""

    def close(self) -> None:
        self._free(self.model)


class Load(ModelWork):
    """Rebuild a model in the engine."""

    def __init__(
        self,
        model: LiveModel,
        free: Free,
        *,
        store: Store,
        recovery: Recovery,
        residents: Residents,
        endings: Endings,
        max_attempts: int,
    ) -> None:
        super().__init__(model, free)
        self._store = store
        self._recovery = recovery
        self._residents = residents
        self._endings = endings
        self._max_attempts = max_attempts

    async def run(self, engine: Engine, generation: int) -> None:
        model = self.model
        model.held_generation = generation
        await self._residents.make_room(engine, model)
        try:
            await self._recovery.rebuild(engine, model)
        except RebuildError as error:
            logger.exception("model %s cannot be rebuilt", model.model_id)
            model.failure = Failure(f"model {model.model_id} is lost: {error}", "server")
            await self._store.models.update(model.model_id, {"is_corrupted": True})
            return
        model.generation = generation
        model.rebuild_attempts = 0

    def engine_died(self, error: EngineError) -> None:
        model = self.model
        model.rebuild_attempts += 1
        if model.rebuild_attempts >= self._max_attempts:
            logger.error("model %s is set aside: %s", model.model_id, error)
            problem = f"the engine died each time model {model.model_id} was rebuilt"
            model.failure = Failure(
                f"{problem}, so it is set aside until the server starts again: {error}", "server"
            )

    def broke(self, error: Exception) -> None:
        logger.error("rebuilding model %s failed", self.model.model_id, exc_info=error)
        problem = f"model {self.model.model_id} could not be loaded: {type(error).__name__}"
        self._endings.end_all(self.model, Failure(problem, "server"))


class Save(ModelWork):
    """Take a snapshot of a model; and then, where it is to leave, put it out of the engine."""

    def __init__(
        self, model: LiveModel, free: Free, snapshots: Snapshots, *, is_leaving: bool
    ) -> None:
        super().__init__(model, free)
        self._snapshots = snapshots
        self._is_leaving = is_leaving

    async def run(self, engine: Engine, generation: int) -> None:
        model = self.model
        if model.generation != generation:
            return
        if model.is_changed or not self._is_leaving:
            await self._snapshots.take(engine, model)
        if self._is_leaving:
            await engine.unload_adapter(model.model_id)
            model.generation = model.held_generation = 0
            # Until then it counts as one that leaves: another would go in its place.
            model.wants_unload = False
            logger.info("unloaded %s", model.model_id)

    def broke(self, error: Exception) -> None:
        """The log goes on growing; another attempt is made when the next snapshot is due. One that
        was to leave still is: nobody says so twice of a session that has ended."""
        logger.error("saving %s failed", self.model.model_id, exc_info=error)
        self.model.next_slot = None
        self._snapshots.put_off(self.model)

    def waited(self, error: TinkerError) -> None:
        self.broke(error)


class Residents:
    """The models that the engine holds, and which of them go when there are too many."""

    def __init__(self, slot: Slot, config: ServerConfig, wake: Free) -> None:
        self._slot = slot
        self._config = config
        self._wake = wake

    async def make_room(self, engine: Engine, incoming: LiveModel) -> None:
        """Mark idle models for the disk where one more is too many.

        An owner who holds fewer than the one who brings a model in loses none for it. While the
        engine holds more memory than it should, one goes for each that comes.
        """
        others = [m for m in self._staying() if m is not incoming]
        excess = len(others) + 1 - self._config.max_loaded_models
        limit = self._config.max_engine_bytes
        health = self._slot.health if limit is None else await engine.health()
        if is_full(health, limit):
            excess = max(excess, 1)
        held = Counter(model.owner for model in [*others, incoming])
        idle = [m for m in others if _is_idle(m) and held[m.owner] >= held[incoming.owner]]
        self._put_away(in_order_of_leaving(idle)[: max(0, excess)])

    def put_away_excess(self) -> None:
        """Mark what is beyond the limit now: models that were all at work at once have come in
        without others making room. Whoever holds most loses most; nobody loses one in the place of
        another's that is at work."""
        staying = self._staying()
        excess = len(staying) - self._config.max_loaded_models
        if excess > 0:
            self._put_away([m for m in in_order_of_leaving(staying)[:excess] if _is_idle(m)])

    def _staying(self) -> list[LiveModel]:
        return [model for model in self._slot.models if model.is_loaded and not model.wants_unload]

    def _put_away(self, models: list[LiveModel]) -> None:
        for model in models:
            model.wants_unload = True
            self._wake(model)


class Resident(Protocol):
    @property
    def owner(self) -> str: ...

    @property
    def last_used_at(self) -> float: ...


M = TypeVar("M", bound=Resident)


def in_order_of_leaving(models: Iterable[M]) -> list[M]:
    """The owner who holds most loses first, the model idle longest, until another holds as many.
    So one who holds no more than an even part of what may stay loses none."""
    place: Counter[str] = Counter()
    ranked = []
    for model in sorted(models, key=lambda m: m.last_used_at, reverse=True):
        ranked.append((place[model.owner], model))
        place[model.owner] += 1
    ranked.sort(key=lambda each: (-each[0], each[1].last_used_at))
    return [model for _, model in ranked]


def is_full(health: Health, max_bytes: int | None) -> bool:
    """Whether the engine holds more than it should, or adapters more than their share."""
    is_beyond = max_bytes is not None and health.memory_bytes > max_bytes
    limit = health.adapter_limit_bytes
    return is_beyond or (limit > 0 and health.adapter_bytes > limit)


def _is_idle(model: LiveModel) -> bool:
    return not model.is_busy and not len(model.queue)
