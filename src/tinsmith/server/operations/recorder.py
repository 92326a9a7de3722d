"""Recording: the step between a checked request and its request id.

An operation is entered into its model's log, on disk, before anybody hears of it; only then does it
join the queue. The same (model, number) again finds the first, also while that is still being
recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable

from tinsmith.server.futures import Promises
from tinsmith.server.operations.kinds import REFUSED, operation_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.operations.operation import Operation
from tinsmith.server.store.records import ModelRecord, OperationRecord
from tinsmith.server.store.store import Store

logger = logging.getLogger(__name__)


class Recorder:
    def __init__(
        self,
        store: Store,
        models: LiveModels,
        promises: Promises,
        wake: Callable[[LiveModel], None],
        max_held_bytes: int,
    ) -> None:
        self._store = store
        self._models = models
        self._promises = promises
        self._wake = wake
        self._max_held_bytes = max_held_bytes
        self._under_way: dict[tuple[str, int], asyncio.Task[str]] = {}

    async def submit(
        self,
        *,
        owner: str,
        kind: str,
        model_id: str,
        seq_id: int,
        body: bytes,
        content_type: str,
        request: object,
        num_tokens: int = 0,
        new_model: ModelRecord | None = None,
    ) -> str:
        """Record an operation and put it into the queue; its request id."""
        operation = OperationRecord(
            request_id=uuid.uuid4().hex,
            model_id=model_id,
            seq_id=seq_id,
            owner=owner,
            kind=kind,
            content_type=content_type,
            payload=body,
            payload_bytes=len(body),
            num_tokens=num_tokens,
            created_at=time.time(),
        )
        return await self._once(operation, request, new_model)

    async def refuse(self, owner: str, model_id: str, seq_id: int, reason: str) -> None:
        """Use up the number of a request that was not accepted, so that nobody waits for it."""
        operation = OperationRecord(
            request_id=uuid.uuid4().hex,
            model_id=model_id,
            seq_id=seq_id,
            owner=owner,
            kind=REFUSED,
            content_type="",
            created_at=time.time(),
            status="failed",
            finished_at=time.time(),
            error=reason,
            category="user",
        )
        await self._once(operation, None, None)

    async def give_up(self, model: LiveModel, missing: list[int]) -> None:
        """Use up numbers that were waited for in vain."""
        for seq_id in missing:
            reason = f"operation {seq_id} came after the others had given up waiting for it"
            await self.refuse(model.record.owner, model.model_id, seq_id, reason)

    async def _once(
        self, operation: OperationRecord, request: object, new_model: ModelRecord | None
    ) -> str:
        key = (operation.model_id, operation.seq_id)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._record(operation, request, new_model))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        # Whoever asked may go away; what is recorded must reach the queue all the same.
        return await asyncio.shield(task)

    async def _record(
        self, operation: OperationRecord, request: object, new_model: ModelRecord | None
    ) -> str:
        if new_model is not None:
            recorded, is_new = await self._store.log.record(operation, new_model)
            if not is_new:
                # Reading a model that is not live yet puts what is pending into its queue.
                found = await self._models.get(operation.model_id)
                assert found is not None, "it was recorded with its model"
                return self._adopt(found, recorded)
            added = self._models.add(new_model)
            if added is None:
                found = await self._models.get(operation.model_id)
                assert found is not None, "it was recorded with its model"
                self._wake(found)
                return operation.request_id
            model = added
        else:
            found = await self._models.get(operation.model_id)
            assert found is not None, "the caller has looked the model up"
            model = found
            model.num_recording += 1
            try:
                recorded, is_new = await self._store.log.record(operation)
            finally:
                model.num_recording -= 1
            if not is_new:
                return self._adopt(model, recorded)
        if operation.kind == REFUSED:
            model.queue.use_up(operation.seq_id)
        else:
            self._promises.open(operation.request_id, operation.owner)
            model.queue.put(self._operation(operation, request))
            model.wants_unload = False
            model.last_used_at = operation.created_at
            logger.info(
                "recorded %s %d of %s",
                operation.kind,
                operation.seq_id,
                operation.model_id,
                extra=operation.log_fields,
            )
        self._wake(model)
        return operation.request_id

    def _adopt(self, model: LiveModel, recorded: OperationRecord) -> str:
        """A number that was recorded before. Its first recording may have seemed to fail, when
        the connection to the store was lost in the midst of it: then nobody has queued it."""
        if recorded.kind == REFUSED:
            model.queue.use_up(recorded.seq_id)
            self._wake(model)
        elif recorded.status == "pending" and self._promises.get(recorded.request_id) is None:
            self._promises.open(recorded.request_id, recorded.owner)
            model.queue.put(operation_of(recorded))
            self._wake(model)
        return recorded.request_id

    def _operation(self, record: OperationRecord, request: object) -> Operation:
        """The operation for the queue. Its payload is on disk; the decoded request is kept while
        there is memory for it, and read again when its turn comes otherwise."""
        record = dataclasses.replace(record, payload=None)
        if self._models.held_bytes + record.payload_bytes > self._max_held_bytes:
            return operation_of(record)
        self._models.held_bytes += record.payload_bytes
        operation = operation_of(record, request)
        operation.is_held = True
        return operation
