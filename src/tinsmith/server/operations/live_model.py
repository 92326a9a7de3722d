"""A live model: what the server knows about a model while somebody uses it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinsmith.engine.base import Failure
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.store.records import Finish, ModelRecord
from tinsmith.types import LoraConfig

if TYPE_CHECKING:
    from tinsmith.server.engines.slot import Slot


@dataclass(slots=True, eq=False)
class LiveModel:
    record: ModelRecord
    queue: SequenceQueue
    slot: Slot | None = None
    """Where the model trains; None while it has nothing to do and no engine holds it."""
    generation: int = 0
    """The slot's engine that holds the model's adapter, counted from 1; 0 for none."""
    held_generation: int = 0
    """The slot's engine that was last told to make the adapter, and may hold it though its state is
    in doubt or its making was cut."""
    next_slot: Slot | None = None
    """Where it is to go on as soon as its state is on disk."""
    is_busy: bool = False
    """Whether something of this model is in the engine's hands."""
    failure: Failure | None = None
    """Why nothing can be done with this model any more."""
    rebuild_attempts: int = 0
    seconds_per_token: float | None = None
    """What its passes took lately; None before the first."""
    last_used_at: float = field(default_factory=time.time)
    is_changed: bool = False
    """Whether operations took effect that the snapshot does not hold."""
    steps_since_snapshot: int = 0
    operations_since_snapshot: int = 0
    """Of its log, with those that failed or were refused; so are their bytes."""
    bytes_since_snapshot: int = 0
    oldest_since_snapshot: float | None = None
    wants_snapshot: bool = False
    """Whether a snapshot is due whatever the policy says, because the newest one was damaged."""
    wants_unload: bool = False
    """Whether it goes to disk once it has nothing to do."""
    unload_after: float = 0.0
    """By the monotonic clock: not before, because it could not be saved."""
    awaited_seq_id: int | None = None
    """The number that its operations wait for; None while they need not."""
    gap_seconds: float = 0.0
    """How long they have waited for it."""
    finishes: list[Finish] = field(default_factory=list)
    """Ends of operations that are not recorded yet, in order."""
    committing: asyncio.Task[None] | None = None
    num_recording: int = 0
    """Operations that are being recorded and will join the queue."""

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def owner(self) -> str:
        return self.record.owner

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(**self.record.lora)

    @property
    def may_unload(self) -> bool:
        return self.wants_unload and time.monotonic() >= self.unload_after

    @property
    def is_loaded(self) -> bool:
        """Whether the present engine of its slot holds it."""
        slot = self.slot
        return slot is not None and slot.is_up and self.generation == slot.generation

    @property
    def is_held(self) -> bool:
        """Whether the present engine of its slot may have something of it."""
        slot = self.slot
        return slot is not None and slot.is_up and self.held_generation == slot.generation

    @property
    def is_idle(self) -> bool:
        """Whether nothing of the model is in an engine, queued or on its way."""
        return (
            not self.is_loaded
            and not self.is_busy
            and not len(self.queue)
            and not self.num_recording
            and self.committing is None
        )

    async def recorded(self) -> None:
        """Wait until every end so far is in the store."""
        while self.committing is not None:
            await asyncio.shield(self.committing)
