"""Recording: the step between a checked request and its request id.

An operation is entered into its model's log, on disk, before anybody hears of it; only then does it
join the queue. The same request again finds the first, also while that is still being recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable

from tinsmith.errors import ValidationError
from tinsmith.server.edge.workers import LARGE_PASS_BYTES, Workers
from tinsmith.server.futures import Promises
from tinsmith.server.operations.codecs import Codec, pass_data
from tinsmith.server.operations.kinds import KINDS, REFUSED, operation_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.recorded_pass import RecordedPass
from tinsmith.server.store.records import ModelRecord, OperationRecord
from tinsmith.server.store.store import Store
from tinsmith.server.tracing import Spans
from tinsmith.types import Datum

logger = logging.getLogger(__name__)

_PART_BYTES = 600
"""What a datum takes beside its parts, and a chunk, a tensor or a span beside its numbers."""


class Recorder:
    def __init__(
        self,
        store: Store,
        models: LiveModels,
        promises: Promises,
        workers: Workers,
        wake: Callable[[LiveModel], None],
        max_held_bytes: int,
        spans: Spans,
    ) -> None:
        self._store = store
        self._models = models
        self._promises = promises
        self._workers = workers
        self._wake = wake
        self._max_held_bytes = max_held_bytes
        self._spans = spans
        self._under_way: dict[tuple[str, int], asyncio.Task[OperationRecord]] = {}

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
        """Record an operation and put it into the queue; its request id.

        The same request again gets the id of the first; another with the same number is refused.
        """
        codec = KINDS[kind].codec
        if len(body) > LARGE_PASS_BYTES:
            looked_at = await self._workers.run(owner, _look_at, codec, len(body), request)
        else:
            looked_at = _look_at(codec, len(body), request)
        digest, held_bytes = looked_at
        operation = OperationRecord(
            request_id=_new_request_id(),
            model_id=model_id,
            seq_id=seq_id,
            owner=owner,
            kind=kind,
            content_type=content_type,
            payload=body,
            payload_bytes=len(body),
            num_tokens=num_tokens,
            created_at=time.time(),
            digest=digest,
        )
        recorded = await self._once(operation, request, held_bytes, new_model)
        if not _is_same(recorded, operation):
            raise ValidationError(
                f"number {seq_id} of {model_id} was used for another request before "
                f"({recorded.kind}); give each request a number of its own",
                "seq_id" if seq_id else "model_seq_id",
            )
        return recorded.request_id

    async def refuse(self, owner: str, model_id: str, seq_id: int, reason: str) -> None:
        """Use up the number of a request that was not accepted, so that nobody waits for it."""
        operation = OperationRecord(
            request_id=_new_request_id(),
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
        await self._once(operation, None, 0, None)

    async def _once(
        self,
        operation: OperationRecord,
        request: object,
        held_bytes: int,
        new_model: ModelRecord | None,
    ) -> OperationRecord:
        """What is recorded under the operation's number: that operation, or an earlier one.
        `held_bytes` is what the request takes in memory."""
        key = (operation.model_id, operation.seq_id)
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._record(operation, request, held_bytes, new_model))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        # Whoever asked may go away; what is recorded must reach the queue all the same.
        return await asyncio.shield(task)

    async def _record(
        self,
        operation: OperationRecord,
        request: object,
        held_bytes: int,
        new_model: ModelRecord | None,
    ) -> OperationRecord:
        if new_model is not None:
            with self._spans.span("store commit"):
                recorded, is_new = await self._store.log.record(operation, new_model)
            if not is_new:
                # Reading a model that is not live yet puts what is pending into its queue.
                return self._adopt(await self._recorded_model(operation), recorded)
            added = self._models.add(new_model)
            if added is None:
                self._wake(await self._recorded_model(operation))
                return operation
            model = added
        else:
            found = await self._models.get(operation.model_id)
            assert found is not None, "the caller has looked the model up"
            model = found
            if operation.seq_id <= model.record.closed_seq_id:
                return await self._late(operation)
            model.num_recording += 1
            try:
                with self._spans.span("store commit"):
                    recorded, is_new = await self._store.log.record(operation)
            finally:
                model.num_recording -= 1
            if not is_new:
                return self._adopt(model, recorded)
        if operation.kind == REFUSED:
            model.queue.use_up(operation.seq_id)
            model.operations_since_snapshot += 1
        else:
            self._promises.open(operation.request_id, operation.owner)
            self._models.enqueue(model, self._operation(operation, request, held_bytes))
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
        return operation

    async def _recorded_model(self, operation: OperationRecord) -> LiveModel:
        """The model that was recorded with its first operation. A reading that began before that
        has found nothing; the next one does."""
        model_id = operation.model_id
        found = await self._models.get(model_id) or await self._models.get(model_id)
        assert found is not None, "it was recorded with its model"
        return found

    async def _late(self, operation: OperationRecord) -> OperationRecord:
        recorded = await self._store.log.find(operation.model_id, operation.seq_id)
        if recorded is None:
            raise ValidationError(
                f"operation {operation.seq_id} came too late: later ones no longer wait for it",
                "seq_id",
            )
        return recorded

    def _adopt(self, model: LiveModel, recorded: OperationRecord) -> OperationRecord:
        """A number that was recorded before. Its first recording may have seemed to fail, when
        the connection to the store was lost in the midst of it: then nobody has queued it."""
        if recorded.kind == REFUSED:
            model.queue.use_up(recorded.seq_id)
            self._wake(model)
        elif recorded.status == "pending" and model.queue.awaits(recorded.seq_id):
            self._promises.open(recorded.request_id, recorded.owner)
            self._models.enqueue(model, operation_of(recorded))
            self._wake(model)
        return recorded

    def _operation(self, record: OperationRecord, request: object, num_bytes: int) -> Operation:
        """The operation for the queue. Its payload is on disk; the decoded request is kept while
        there is memory for it, a part of it for one owner, and read again in its turn otherwise."""
        record = dataclasses.replace(record, payload=None)
        is_held = self._models.has_room(record.owner, num_bytes, self._max_held_bytes)
        operation = operation_of(record, request if is_held else None)
        operation.held_bytes = num_bytes if is_held else 0
        operation.cause = self._spans.here()
        return operation


def _look_at(codec: Codec, payload_bytes: int, request: object) -> tuple[str, int]:
    """A request's digest, and what it takes in memory."""
    return codec.digest(request), _memory_bytes(payload_bytes, request)


def _memory_bytes(payload_bytes: int, request: object) -> int:
    """About what a decoded request takes: its numbers, which lie in its body or, made of shorter
    ones or of JSON, beside it; and each part of it a few objects, however small it was there."""
    num_parts, num_bytes = 1, payload_bytes
    if isinstance(request, RecordedPass):
        data, _, _, _ = pass_data(request.request)
        num_parts += sum(map(_num_parts, data))
        num_bytes = max(num_bytes, sum(datum.nbytes for datum in data))
    return num_bytes + _PART_BYTES * num_parts


def _num_parts(datum: Datum) -> int:
    spans = len(datum.model_input_spans or ()) + len(datum.loss_fn_input_spans or ())
    return 1 + len(datum.model_input.chunks) + len(datum.loss_fn_inputs) + spans


def _is_same(recorded: OperationRecord, operation: OperationRecord) -> bool:
    """Whether both are one request. One that was refused before is refused again as it was."""
    if recorded.kind == REFUSED:
        return True
    return recorded.kind == operation.kind and recorded.digest in (None, operation.digest)


def _new_request_id() -> str:
    """In the order of time: what was recorded together lies together in the store's index, and
    goes to disk in one page instead of one for each."""
    return f"{int(time.time() * 1000):012x}{uuid.uuid4().hex[12:]}"
