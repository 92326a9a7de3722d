"""Live models: what the server knows about a model while somebody uses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tinsmith.engine.base import Failure
from tinsmith.server.futures import Promises
from tinsmith.server.operations.kinds import Operation
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.store.records import Finish, ModelRecord
from tinsmith.server.store.store import Store
from tinsmith.types import LoraConfig


@dataclass(slots=True, eq=False)
class LiveModel:
    record: ModelRecord
    queue: SequenceQueue
    generation: int = 0
    """The engine that holds the model's adapter, counted from 1; 0 for none."""
    is_busy: bool = False
    """Whether something of this model is in the engine's hands."""
    num_claimed: int = 0
    """Passes of the batch under way that are not finished."""
    failure: Failure | None = None
    """Why nothing can be done with this model any more."""
    rebuild_attempts: int = 0
    tokens_served: float = 0.0
    """Tokens of this model's passes so far, for fair turns."""
    last_used_at: float = field(default_factory=time.time)
    is_changed: bool = False
    """Whether operations took effect that the snapshot does not hold."""
    steps_since_snapshot: int = 0
    bytes_since_snapshot: int = 0
    oldest_since_snapshot: float | None = None
    wants_snapshot: bool = False
    """Whether a snapshot is due whatever the policy says, because the newest one was damaged."""
    wants_unload: bool = False
    gap_since: float | None = None
    finishes: list[Finish] = field(default_factory=list)
    """Ends of operations that are not recorded yet, in order."""
    committing: asyncio.Task[None] | None = None
    num_recording: int = 0
    """Operations that are being recorded and will join the queue."""

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(**self.record.lora)

    def is_idle(self, generation: int) -> bool:
        """Whether nothing of the model is in the engine, queued or on its way."""
        return (
            self.generation != generation
            and not self.is_busy
            and not len(self.queue)
            and not self.num_recording
            and self.committing is None
        )

    async def recorded(self) -> None:
        """Wait until every end so far is in the store."""
        while self.committing is not None:
            await asyncio.shield(self.committing)


class LiveModels:
    """The models in use, read from the store when first asked for."""

    def __init__(self, store: Store, promises: Promises) -> None:
        self._store = store
        self._promises = promises
        self._models: dict[str, LiveModel] = {}
        self._reading: dict[str, asyncio.Task[LiveModel | None]] = {}
        self.held_bytes = 0
        """Bytes of queued requests that are kept in memory, decoded."""

    def __iter__(self) -> Iterator[LiveModel]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    def add(self, record: ModelRecord) -> LiveModel | None:
        """A model whose creation was just recorded; its log begins with operation 0.

        None when somebody has read it from the store meanwhile, and that operation with it.
        """
        if record.model_id in self._models or record.model_id in self._reading:
            return None
        model = LiveModel(record=record, queue=SequenceQueue(0))
        self._models[record.model_id] = model
        return model

    def is_live(self, model_id: str) -> bool:
        return model_id in self._models or model_id in self._reading

    def forget_idle(self, generation: int, used_before: float) -> None:
        """Let go of models that nobody has used for a while; the store has them."""
        for model in self:
            if model.is_idle(generation) and model.last_used_at < used_before:
                del self._models[model.model_id]

    async def get(self, model_id: str) -> LiveModel | None:
        if model_id in self._models:
            return self._models[model_id]
        if model_id not in self._reading:
            # Two readers at once would make two queues of one log.
            task = asyncio.create_task(self._read(model_id))
            self._reading[model_id] = task
            task.add_done_callback(lambda _: self._reading.pop(model_id, None))
        return await asyncio.shield(self._reading[model_id])

    async def _read(self, model_id: str) -> LiveModel | None:
        record = await self._store.models.get(model_id)
        if record is None:
            return None
        log = await self._store.log.read(model_id, record.snapshot_seq_id)
        queue = SequenceQueue(
            record.snapshot_seq_id + 1, [o.seq_id for o in log if o.status != "pending"]
        )
        model = LiveModel(record=record, queue=queue)
        for operation in log:
            if operation.status == "pending":
                self._promises.open(operation.request_id, operation.owner)
                queue.put(Operation(operation))
            elif operation.status == "done" and operation.kind not in ("forward", "create_model"):
                model.is_changed = True
        if record.retired_at is not None:
            problem = f"the state of {model_id} was dropped because it was not used for very long"
            model.failure = Failure(f"{problem}; start from a checkpoint", "user")
        if log and log[0].seq_id == 0 and log[0].status == "failed":
            model.failure = Failure(f"model {model_id} was not created: {log[0].error}", "user")
        return self._models.setdefault(model_id, model)
