"""The models in use, read from the store when first asked for."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tinsmith.engine.base import Failure
from tinsmith.server.futures import Promises
from tinsmith.server.operations.kinds import REFUSED, changed_model, operation_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.store.records import ModelRecord, OperationRecord
from tinsmith.server.store.store import Store
from tinsmith.server.tuning import TUNING

_READ_AT_A_TIME = 128
"""Models that are read together at a start."""

_ROWS_AT_A_TIME = 4096
"""Operations that are read together with them, with requests of a few kilobytes each."""

_OWNER_PART = 8
"""One owner's decoded requests take at most this fraction of the memory for all of them."""

_LATE = "it was recorded too late: later operations no longer waited for it"

_RECORD_BYTES = 1024
"""What an operation takes in memory, about, beside its request."""


@dataclass(slots=True)
class Backlog:
    num_operations: int = 0
    num_bytes: int = 0
    held_bytes: int = 0
    """The memory that requests take which are kept decoded."""

    def add(self, operation: Operation, sign: int) -> None:
        self.num_operations += sign
        self.num_bytes += sign * operation.record.payload_bytes
        self.held_bytes += sign * operation.held_bytes


class LiveModels:
    def __init__(
        self, store: Store, promises: Promises, history_bytes: int = TUNING.history_bytes
    ) -> None:
        self._max_bytes = history_bytes
        self._store = store
        self._promises = promises
        self._models: dict[str, LiveModel] = {}
        self._reading: dict[str, asyncio.Task[LiveModel | None]] = {}
        self._backlogs: dict[str, Backlog] = {}
        self._together = Backlog()
        self._histories: dict[LiveModel, tuple[Sequence[OperationRecord], int]] = {}
        """What took effect after a model's snapshot, as it was read with the model, and its size.
        It is true until something of the model has ended, and wanted once: for its rebuilding."""
        self._kept_bytes = 0

    def backlog_of(self, owner: str) -> Backlog:
        """What the owner has sent and not yet got an end for."""
        return self._backlogs.get(owner) or Backlog()

    @property
    def held_bytes(self) -> int:
        """The memory that queued requests take which are kept decoded."""
        return self._together.held_bytes

    def has_room(self, owner: str, num_bytes: int, most: int) -> bool:
        """Whether so much more of an owner's requests may be held, where there are `most` bytes for
        everybody's and a part of them for one owner's."""
        held = self.backlog_of(owner).held_bytes
        return self.held_bytes + num_bytes <= most and held + num_bytes <= most // _OWNER_PART

    def enqueue(self, model: LiveModel, operation: Operation) -> None:
        """Put a recorded operation into its model's queue, and count it until it has ended."""
        model.queue.put(operation)
        self._backlogs.setdefault(model.owner, Backlog()).add(operation, 1)
        self._together.add(operation, 1)

    def ended(self, model: LiveModel, operation: Operation) -> None:
        backlog = self._backlogs[model.owner]
        backlog.add(operation, -1)
        self._together.add(operation, -1)
        operation.request, operation.held_bytes = None, 0
        self.take_history(model)
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
                self.take_history(model)
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

    async def bring_back(self, used_since: float, most: int) -> None:
        """At a start: models that have something to do, and of those that were in use lately the
        last ones, that many. Their clients all come back at once, so they are read together."""
        pending = await self._store.log.models_with_pending()
        recent = await self._store.models.used_since(used_since, most)
        wanted = list(dict.fromkeys([*pending, *recent]))
        for start in range(0, len(wanted), _READ_AT_A_TIME):
            await self._read_together(wanted[start : start + _READ_AT_A_TIME])

    def take_history(self, model: LiveModel) -> Sequence[OperationRecord] | None:
        """What a rebuild has to replay, if that was read with the model and nothing of the model
        has ended since."""
        history, num_bytes = self._histories.pop(model, (None, 0))
        self._kept_bytes -= num_bytes
        return history

    async def _read_together(self, model_ids: Sequence[str]) -> None:
        left = {each.model_id: each for each in await self._store.models.get_many(model_ids)}
        while left:
            rows = await self._store.log.read_after_snapshots(list(left), _ROWS_AT_A_TIME)
            logs = {key: list(log) for key, log in groupby(rows, lambda row: row.model_id)}
            is_cut = len(rows) == _ROWS_AT_A_TIME
            if is_cut:
                last, _ = logs.popitem()  # there may be more of it
                if not logs:
                    await self._read_log(left.pop(last))
            for model_id in list(logs if is_cut else left):
                log = _LogAfterSnapshot(self._max_bytes)
                log.add(logs.pop(model_id, []))
                await self._make(left.pop(model_id), log)

    async def _read(self, model_id: str) -> LiveModel | None:
        record = await self._store.models.get(model_id)
        return None if record is None else await self._read_log(record)

    async def _read_log(self, record: ModelRecord) -> LiveModel:
        """A model of its record and its log, whose requests are read when they are used."""
        log = _LogAfterSnapshot(self._max_bytes)
        async for page in self._store.log.pages(record.model_id, record.snapshot_seq_id):
            log.add(page)
        return await self._make(record, log)

    async def _make(self, record: ModelRecord, log: _LogAfterSnapshot) -> LiveModel:
        """A model of its record and its log, unless another reader has made it meanwhile."""
        model_id = record.model_id
        if log.drop_late(record.closed_seq_id):
            await self._store.log.close(model_id, record.closed_seq_id, _LATE)
        closed_seq_id = log.closed_seq_id(record)
        if closed_seq_id != record.closed_seq_id:
            await self._store.models.update(model_id, {"closed_seq_id": closed_seq_id})
            record = dataclasses.replace(record, closed_seq_id=closed_seq_id)
        # From here on nothing is waited for: what is pending joins one queue, and counts once.
        if model_id in self._models:
            return self._models[model_id]
        first = max(record.snapshot_seq_id, record.closed_seq_id) + 1
        queue = SequenceQueue(first, [seq_id for seq_id in log.ended if seq_id >= first])
        model = self._models[model_id] = LiveModel(record=record, queue=queue)
        for operation in log.pending:
            self._promises.open(operation.request_id, operation.owner)
            self.enqueue(model, self._waiting(operation))
        model.is_changed = log.is_changed
        model.operations_since_snapshot = len(log.ended)
        model.bytes_since_snapshot = log.ended_bytes
        if record.retired_at is not None:
            problem = f"the state of {model_id} was dropped because it was not used for very long"
            model.failure = Failure(f"{problem}; start from a checkpoint", "user")
        if log.creation is not None and log.creation.status == "failed":
            problem = f"model {model_id} was not created: {log.creation.error}"
            model.failure = Failure(problem, "user")
        self._keep(model, log)
        return model

    def _waiting(self, record: OperationRecord) -> Operation:
        """An operation for its model's queue; its request may have been read with it."""
        if not self.has_room(record.owner, record.payload_bytes, self._max_bytes):
            record = dataclasses.replace(record, payload=None)
        operation = operation_of(record)
        operation.held_bytes = 0 if record.payload is None else record.payload_bytes
        return operation

    def _keep(self, model: LiveModel, log: _LogAfterSnapshot) -> None:
        if log.has_history and self._kept_bytes + log.history_bytes <= self._max_bytes:
            self._histories[model] = log.history, log.history_bytes
            self._kept_bytes += log.history_bytes


class _LogAfterSnapshot:
    """What is wanted of a model's log above its snapshot; it is added in order, a part at a time.
    Of operations that have ended and are not replayed only the numbers are kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.creation: OperationRecord | None = None
        self.pending: list[OperationRecord] = []
        self.ended: list[int] = []
        self.ended_bytes = 0
        self.is_changed = False
        self.history: list[OperationRecord] = []
        """What a rebuild has to replay, unless it is too large to be kept."""
        self.history_bytes = 0
        self._last_accepted = -1

    @property
    def has_history(self) -> bool:
        return self.history_bytes <= self._max_bytes

    def add(self, operations: Sequence[OperationRecord]) -> None:
        for operation in operations:
            if operation.seq_id == 0:
                self.creation = operation
            if operation.kind != REFUSED:
                self._last_accepted = operation.seq_id
            if operation.status == "pending":
                self.pending.append(operation)
                continue
            self.ended.append(operation.seq_id)
            self.ended_bytes += operation.payload_bytes
            if changed_model(operation):
                self.is_changed = True
                self.history_bytes += _RECORD_BYTES + len(operation.payload or b"")
                self.history.append(operation)
                if not self.has_history:
                    self.history = []

    def drop_late(self, closed_seq_id: int) -> bool:
        """Leave out what is pending under a number that nobody waits for any more; whether there
        was any. It was recorded as the connection was lost, and nobody heard of it."""
        pending = [each for each in self.pending if each.seq_id > closed_seq_id]
        is_any = len(pending) < len(self.pending)
        self.pending = pending
        return is_any

    def closed_seq_id(self, record: ModelRecord) -> int:
        """The last number up to which none is waited for.

        What waited for a number in vain has ended first, and then this is noted. Where the server
        died in between, it follows: operations end in order, so when none is pending, nobody waits
        for a number below one that has ended.
        """
        if self.pending:
            return record.closed_seq_id
        known = set(self.ended)
        first = max(record.snapshot_seq_id, record.closed_seq_id) + 1
        has_gap = any(number not in known for number in range(first, self._last_accepted))
        return self._last_accepted if has_gap else record.closed_seq_id
