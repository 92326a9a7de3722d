"""Which slot's scheduler a model's operations go to, and how a model comes from one to another.

A model is given a slot when it has something to do and leaves it when it has not and no engine
holds it, so idle models weigh on none. It moves between two of its operations: its state is saved
where it is, its queue goes with it, and it is rebuilt from that snapshot where it goes. Clients
notice nothing but the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tinsmith.errors import ValidationError
from tinsmith.server.engines.draining import Draining
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.engines.slot import Slot
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.runner import Free
from tinsmith.server.operations.scheduler import Scheduler

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class Dispatcher:
    def __init__(
        self,
        pool: EnginePool,
        models: LiveModels,
        new_scheduler: Callable[[Slot, Free], Scheduler],
        draining: Draining,
        lost_seconds: float,
    ) -> None:
        """A slot without an engine for `lost_seconds` loses its models to the others."""
        self._pool = pool
        self._models = models
        self._draining = draining
        self._lost_seconds = lost_seconds
        self.schedulers = {slot: new_scheduler(slot, self._let_go) for slot in pool.training}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for slot, scheduler in self.schedulers.items():
                tasks.create_task(scheduler.run(), name=f"scheduler of slot {slot.number}")
            while True:
                try:
                    self.look_after()
                except Exception:
                    logger.exception("looking after the slots failed; it will be tried again")
                await asyncio.sleep(_LOOK_SECONDS)

    async def drain(self) -> None:
        """Wait for what is under way; nothing new starts once `run` is cancelled."""
        await asyncio.gather(*(scheduler.drain() for scheduler in self.schedulers.values()))

    def wake(self, model: LiveModel) -> None:
        """Something of this model may have become ready."""
        if model.slot is None and len(model.queue):
            self._pin(model)
        if model.slot is not None:
            self.schedulers[model.slot].wake(model)

    def wake_all(self) -> None:
        for model in self._models:
            self.wake(model)

    def look_after(self) -> None:
        """What is done every second: nobody waits in a slot that is lost or to be emptied."""
        draining = self._draining.read()
        for slot in self._pool.slots:
            slot.is_draining = slot.number in draining
            self._give_up_if_lost(slot)
        for slot in self._pool.training:
            if not slot.is_open:
                self._empty(slot)
        for model in self._models:
            if model.slot is None:
                self.wake(model)

    def move(self, model: LiveModel, number: int) -> None:
        """Have a model train in another slot, from its next operation on."""
        slot = next((s for s in self._pool.training if s.number == number), None)
        if slot is None:
            known = ", ".join(str(each.number) for each in self._pool.training)
            raise ValidationError(f"no slot {number} trains models; those that do: {known}", "slot")
        if not slot.is_open:
            raise ValidationError(f"slot {number} is {slot.state}; choose another", "slot")
        self._send(model, slot)

    # Questions about what is under way

    @property
    def is_batch_running(self) -> bool:
        return any(scheduler.is_batch_running for scheduler in self.schedulers.values())

    def running(self) -> list[Operation]:
        """The operations in the engines' hands."""
        return [each for scheduler in self.schedulers.values() for each in scheduler.running()]

    def ahead_of(self, model: LiveModel) -> tuple[int, int]:
        """How many models of its slot are served before one that waits for its turn, and the tokens
        of what they have ready and of what is running."""
        return (0, 0) if model.slot is None else self.schedulers[model.slot].ahead_of(model)

    # Moving

    def _send(self, model: LiveModel, slot: Slot) -> None:
        model.next_slot = None if model.slot is slot else slot
        self.wake(model)

    def _let_go(self, model: LiveModel) -> None:
        """Nothing keeps the model where it is; it goes where it should once it has work."""
        if model.slot is not None:
            del model.slot.models[model]
            model.slot = None
        self.wake(model)

    def _pin(self, model: LiveModel) -> None:
        wanted, model.next_slot = model.next_slot, None
        slot = wanted if wanted is not None and wanted.is_open else self._pool.training_slot(model)
        logger.info("model %s trains in slot %d", model.model_id, slot.number)
        model.slot, model.generation, model.held_generation = slot, 0, 0
        model.wants_unload = False
        slot.models[model] = None
        slot.bases.add(model.record.base_model)

    def _give_up_if_lost(self, slot: Slot) -> None:
        """Where others could do what a slot does that has been without an engine for long."""
        if slot.is_up or slot.is_lost:
            return
        peers = self._pool.training if slot.plan.trains else self._pool.sampling
        waited = asyncio.get_running_loop().time() - slot.down_since
        if waited >= self._lost_seconds and any(peer.is_up for peer in peers):
            logger.error("slot %d is given up for now: %s", slot.number, slot.trouble)
            slot.give_up()

    def _empty(self, slot: Slot) -> None:
        for model in list(slot.models):
            if model.next_slot is None:
                target = self._pool.training_slot(model)
                if target is not slot:
                    self._send(model, target)
