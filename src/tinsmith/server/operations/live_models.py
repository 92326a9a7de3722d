"""The models in use, read from the store when first asked for."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith.engine.base import Failure
from tinsmith.server.futures import Promises
from tinsmith.server.operations.kinds import REFUSED, changed_model, operation_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.store.records import ModelRecord, OperationRecord
from tinsmith.server.store.store import Store


@dataclass(slots=True)
class Backlog:
    num_operations: int = 0
    num_bytes: int = 0
    held_bytes: int = 0
    """Of these, what is kept in memory, decoded."""

    def add(self, operation: Operation, sign: int) -> None:
        num_bytes = sign * operation.record.payload_bytes
        self.num_operations += sign
        self.num_bytes += num_bytes
        self.held_bytes += num_bytes * operation.is_held


class LiveModels:
    def __init__(self, store: Store, promises: Promises) -> None:
        self._store = store
        self._promises = promises
        self._models: dict[str, LiveModel] = {}
        self._reading: dict[str, asyncio.Task[LiveModel | None]] = {}
        self._backlogs: dict[str, Backlog] = {}
        self._together = Backlog()

    def backlog_of(self, owner: str) -> Backlog:
        """What the owner has sent and not yet got an end for."""
        return self._backlogs.get(owner) or Backlog()

    @property
    def held_bytes(self) -> int:
        """Bytes of queued requests that are kept in memory, decoded."""
        return self._together.held_bytes

    def enqueue(self, model: LiveModel, operation: Operation) -> None:
        """Put a recorded operation into its model's queue, and count it until it has ended."""
        model.queue.put(operation)
        self._backlogs.setdefault(model.owner, Backlog()).add(operation, 1)
        self._together.add(operation, 1)

    def ended(self, model: LiveModel, operation: Operation) -> None:
        backlog = self._backlogs[model.owner]
        backlog.add(operation, -1)
        self._together.add(operation, -1)
        operation.request, operation.is_held = None, False
        if not backlog.num_operations:
            del self._backlogs[model.owner]

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

    def find(self, model_id: str) -> LiveModel | None:
        """A model if it is in use; the store is not asked."""
        return self._models.get(model_id)

    def is_live(self, model_id: str) -> bool:
        return model_id in self._models or model_id in self._reading

    def forget_idle(self, used_before: float) -> None:
        """Let go of models that nobody has used for a while; the store has them."""
        for model in self:
            if model.is_idle and model.last_used_at < used_before:
                del self._models[model.model_id]
                if model.slot is not None:
                    del model.slot.models[model]

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
        closed_seq_id = _closed_seq_id(record, log)
        if closed_seq_id != record.closed_seq_id:
            await self._store.models.update(model_id, {"closed_seq_id": closed_seq_id})
            record = dataclasses.replace(record, closed_seq_id=closed_seq_id)
        first = max(record.snapshot_seq_id, record.closed_seq_id) + 1
        ended = [o.seq_id for o in log if o.status != "pending" and o.seq_id >= first]
        queue = SequenceQueue(first, ended)
        model = LiveModel(record=record, queue=queue)
        for operation in log:
            if operation.status == "pending":
                self._promises.open(operation.request_id, operation.owner)
                self.enqueue(model, operation_of(operation))
            elif changed_model(operation):
                model.is_changed = True
        if record.retired_at is not None:
            problem = f"the state of {model_id} was dropped because it was not used for very long"
            model.failure = Failure(f"{problem}; start from a checkpoint", "user")
        if log and log[0].seq_id == 0 and log[0].status == "failed":
            model.failure = Failure(f"model {model_id} was not created: {log[0].error}", "user")
        return self._models.setdefault(model_id, model)


def _closed_seq_id(record: ModelRecord, log: Sequence[OperationRecord]) -> int:
    """The last number up to which none is waited for.

    What waited for a number in vain has ended first, and then this is noted. Where the server died
    in between, it follows: operations end in order, so when none is pending, nobody waits for a
    number below one that has ended.
    """
    if any(operation.status == "pending" for operation in log):
        return record.closed_seq_id
    last = max((o.seq_id for o in log if o.kind != REFUSED), default=-1)
    known = {operation.seq_id for operation in log}
    first = max(record.snapshot_seq_id, record.closed_seq_id) + 1
    has_gap = any(number not in known for number in range(first, last))
    return last if has_gap else record.closed_seq_id
