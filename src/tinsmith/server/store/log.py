"""The log: operations with their requests and results. How long they stay is for `retention`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.blobs import Blobs
from tinsmith.server.store.checkpoints import put_checkpoint
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.errors import (
    ExpiredOperationError,
    StoreDamagedError,
    StoreUnavailableError,
)
from tinsmith.server.store.observing.all_steps import LOGGED_COLUMNS
from tinsmith.server.store.observing.examples import Examples
from tinsmith.server.store.observing.steps import Steps
from tinsmith.server.store.records import Finish, ModelRecord, OperationRecord, StepRecord
from tinsmith.server.store.weights import Weights

logger = logging.getLogger(__name__)

_USED = (
    sa.update(schema.models)
    .where(
        schema.models.c.model_id == sa.bindparam("of_model"),
        schema.models.c.trimmed_seq_id < sa.bindparam("number"),
    )
    .values(last_request_at=sa.bindparam("at"))
)
_ENDED = sa.update(schema.operations).where(
    schema.operations.c.request_id == sa.bindparam("of_request"),
    schema.operations.c.status == "pending",
)
_COLUMNS = [schema.operations.c[f.name] for f in dataclasses.fields(OperationRecord)]
_LIGHT_COLUMNS = [c for c in _COLUMNS if c.name not in ("payload", "result")]
_ENDED_COLUMNS = (
    "status",
    "finished_at",
    "result_type",
    "result",
    "result_file",
    "result_bytes",
    "error",
    "category",
    "took_effect",
    "weights_id",
    "entry_id",
    *LOGGED_COLUMNS,
)

# Made once: building a statement and its cache key costs more than carrying it out.
_OF_MODEL = sa.select(*_LIGHT_COLUMNS).where(
    schema.operations.c.model_id == sa.bindparam("of_model")
)
_WITH_NUMBER = _OF_MODEL.where(schema.operations.c.seq_id == sa.bindparam("number"))
_AFTER_NUMBER = _OF_MODEL.where(schema.operations.c.seq_id > sa.bindparam("number")).order_by(
    schema.operations.c.seq_id
)
_SMALL_BYTES = 4096
"""Requests that are read with their operations, where many are read together."""

PAGE_ROWS = 4096
"""Operations of one model that are read at a time, without their requests."""

_PAGE_AFTER_NUMBER = _AFTER_NUMBER.limit(PAGE_ROWS)

_AFTER_SNAPSHOTS = (
    sa.select(
        *_LIGHT_COLUMNS,
        sa.case(
            (schema.operations.c.payload_bytes <= _SMALL_BYTES, schema.operations.c.payload)
        ).label("payload"),
    )
    .join(schema.models, schema.models.c.model_id == schema.operations.c.model_id)
    .where(
        schema.models.c.model_id.in_(sa.bindparam("of_models", expanding=True)),
        schema.operations.c.seq_id > schema.models.c.snapshot_seq_id,
    )
    .order_by(schema.operations.c.model_id, schema.operations.c.seq_id)
    .limit(sa.bindparam("most"))
)
_WITH_RESULT = sa.select(*[c for c in _COLUMNS if c.name != "payload"]).where(
    schema.operations.c.request_id == sa.bindparam("of_request")
)
_PAYLOADS = sa.select(schema.operations.c.request_id, schema.operations.c.payload).where(
    schema.operations.c.request_id.in_(sa.bindparam("of_requests", expanding=True)),
    schema.operations.c.payload.is_not(None),
)
_PAYLOAD = sa.select(schema.operations.c.payload, schema.operations.c.payload_file).where(
    schema.operations.c.request_id == sa.bindparam("of_request")
)


class Log:
    def __init__(
        self, database: Database, blobs: Blobs, weights: Weights, steps: Steps, examples: Examples
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._weights = weights
        self._steps = steps
        self._examples = examples
        table = schema.operations
        put_new = database.insert(table).on_conflict_do_nothing()
        self._put_new = database.prepared(put_new, [column.name for column in _COLUMNS])
        self._note_used = database.prepared(_USED, ["of_model", "number", "at"])
        self._payload_of = database.prepared(_PAYLOAD, ["of_request"])
        self._note_ended = database.prepared(_ENDED, ["of_request", *_ENDED_COLUMNS])

    async def record(
        self, operation: OperationRecord, model: ModelRecord | None = None
    ) -> tuple[OperationRecord, bool]:
        """Enter an operation (and the model that it creates) into the log.

        When its (model_id, seq_id) is taken, nothing changes, and the answer is the first
        operation and False. One that was trimmed is an `ExpiredOperationError`.
        """
        values = {**row_of(operation), "error": _storable(operation.error)}
        if operation.payload is not None and self._blobs.takes(operation.payload):
            name = f"{operation.request_id}.payload"
            values["payload_file"] = await self._blobs.write(name, operation.payload)
            values["payload"] = None

        def write(connection: sa.Connection) -> tuple[OperationRecord, bool]:
            is_new = self._put_new(connection, values).rowcount == 1
            if is_new and model is not None:
                connection.execute(sa.insert(schema.models), row_of(model))
            elif is_new and not self._note_use(connection, operation):
                raise ExpiredOperationError(
                    f"operation {operation.seq_id} of {operation.model_id} ended long ago and is "
                    "no longer in the log; it is not carried out again",
                    "seq_id",
                )
            return (operation if is_new else self._first(connection, operation)), is_new

        is_new = False
        try:
            recorded, is_new = await self._database.write(write)
        except (StoreUnavailableError, asyncio.CancelledError):
            is_new = True  # perhaps: the retry finds it, or the next start does
            raise
        finally:
            if not is_new and values["payload_file"] is not None:
                await self._blobs.delete([values["payload_file"]])
        return recorded, is_new

    async def finish(self, finishes: Sequence[Finish]) -> list[tuple[int, StepRecord]]:
        """Record ends, all or none; what stays of them, by number. An operation that has ended
        already is left as it is."""
        rows = [await self._end_row(finish) for finish in finishes]

        def write(connection: sa.Connection) -> list[tuple[int, StepRecord]]:
            ended = (
                self._finish_one(connection, finish, row)
                for finish, row in zip(finishes, rows, strict=True)
            )
            return [step for step in ended if step is not None]

        return await self._database.write(write)

    async def _end_row(self, finish: Finish) -> dict[str, Any]:
        row: dict[str, Any] = {
            "status": finish.status,
            "finished_at": finish.finished_at,
            "result_type": finish.result_type,
            "result": finish.result,
            "result_bytes": len(finish.result or b""),
            "error": _storable(finish.error),
            "category": finish.category,
            "took_effect": finish.took_effect,
            "weights_id": finish.used_weights_id,
            "result_file": None,
        }
        if finish.result is not None and self._blobs.takes(finish.result):
            name = f"{finish.request_id}.result"
            row["result_file"] = await self._blobs.write(name, finish.result)
            row["result"] = None
        for name in LOGGED_COLUMNS:
            row[name] = getattr(finish.step, name, None)
        return row

    def _finish_one(
        self, connection: sa.Connection, finish: Finish, row: dict[str, Any]
    ) -> tuple[int, StepRecord] | None:
        number = None if finish.step is None else self._steps.next_number()
        given = {"of_request": finish.request_id, "entry_id": number, **row}
        ended = self._note_ended(connection, given)
        if ended.rowcount != 1:
            return None
        if finish.step is not None and finish.step.made is not None:
            connection.execute(
                sa.update(schema.operations)
                .where(schema.operations.c.request_id == finish.request_id)
                .values(made=finish.step.made)
            )
        if finish.weights is not None:
            made = finish.checkpoint or finish.sampler
            if made is not None:
                self._weights.check_room(connection, made.owner, finish.weights.size_bytes)
            connection.execute(sa.insert(schema.weights), row_of(finish.weights))
        if finish.checkpoint is not None:
            put_checkpoint(connection, finish.checkpoint)
        if finish.sampler is not None:
            connection.execute(sa.insert(schema.samplers), row_of(finish.sampler))
        if finish.audit is not None:
            connection.execute(sa.insert(schema.audit), row_of(finish.audit))
        for example in finish.examples:
            self._examples.add(connection, example)
        step = finish.step
        if step is None or number is None:
            return None
        if step.error is not None:
            step = step._replace(error=row["error"])
        return number, step

    async def get(self, request_id: str) -> OperationRecord | None:
        found = await self._database.one(OperationRecord, _WITH_RESULT, {"of_request": request_id})
        if found is None or found.result_file is None:
            return found
        try:
            result = await self._blobs.read(found.result_file)
        except StoreDamagedError:
            logger.exception("the result of %s is lost", request_id)
            return dataclasses.replace(found, result_type="dropped")
        return dataclasses.replace(found, result=result)

    async def read(self, model_id: str, after_seq_id: int) -> Sequence[OperationRecord]:
        """The operations above `after_seq_id`, in order, without payloads and results."""
        after = {"of_model": model_id, "number": after_seq_id}
        return await self._database.all(OperationRecord, _AFTER_NUMBER, after)

    async def pages(
        self, model_id: str, after_seq_id: int
    ) -> AsyncIterator[Sequence[OperationRecord]]:
        """The same, some thousand at a time: a log may be long."""
        page: Sequence[OperationRecord] = ()
        while not page or len(page) == PAGE_ROWS:
            after = {"of_model": model_id, "number": page[-1].seq_id if page else after_seq_id}
            page = await self._database.all(OperationRecord, _PAGE_AFTER_NUMBER, after)
            if not page:
                return
            yield page

    async def read_after_snapshots(
        self, model_ids: Sequence[str], most: int
    ) -> Sequence[OperationRecord]:
        """The operations of some models above their snapshots, model by model, in order, with
        requests that are small; the first `most` of them."""
        of = {"of_models": model_ids, "most": most}
        return await self._database.all(OperationRecord, _AFTER_SNAPSHOTS, of)

    async def pending(self, model_id: str, before: int, limit: int) -> Sequence[OperationRecord]:
        """The last operations below a number that have not ended, without payloads."""
        table = schema.operations
        query = sa.select(*_LIGHT_COLUMNS).where(
            table.c.model_id == model_id, table.c.status == "pending", table.c.seq_id < before
        )
        return await self._database.all(
            OperationRecord, query.order_by(table.c.seq_id.desc()).limit(limit)
        )

    async def find(self, model_id: str, seq_id: int) -> OperationRecord | None:
        """The operation with a number, without payload and result."""
        numbered = {"of_model": model_id, "number": seq_id}
        return await self._database.one(OperationRecord, _WITH_NUMBER, numbered)

    async def read_payload(self, request_id: str) -> bytes:

        def read() -> Any:
            with self._database.connect() as connection:
                return self._payload_of(connection, {"of_request": request_id}).fetchone()

        payload, payload_file = await self._database.in_thread(read)
        if payload_file is not None:
            return await self._blobs.read(payload_file)
        return bytes(payload)

    async def read_payloads(self, request_ids: Sequence[str]) -> Mapping[str, bytes]:
        """The payloads of many operations, of those that are in the table and not in files."""

        def read() -> dict[str, bytes]:
            with self._database.connect() as connection:
                rows = connection.execute(_PAYLOADS, {"of_requests": request_ids})
                return {request_id: bytes(payload) for request_id, payload in rows}

        return await self._database.in_thread(read)

    async def blob_names(self) -> set[str]:
        """The files that operations refer to."""
        results = schema.operations.c.result_file
        named = await self._database.column(sa.select(results).where(results.is_not(None)))
        return {*await self.payload_names(), *named}

    async def payload_names(self) -> set[str]:
        """The files with requests, without which a model cannot be rebuilt."""
        payloads = schema.operations.c.payload_file
        return set(await self._database.column(sa.select(payloads).where(payloads.is_not(None))))

    async def mark_lost(self, name: str, reason: str) -> None:
        """A file cannot be read any more: what waits for its request has failed, and its result is
        gone. A request that was carried out stays named: a rebuild must not do without it."""
        table = schema.operations
        is_waiting = sa.and_(table.c.payload_file == name, table.c.status == "pending")
        failed = {
            "status": "failed",
            "finished_at": time.time(),
            "error": f"the recorded request cannot be read: {reason}",
            "category": "server",
            "payload_file": None,
        }
        dropped = {"result_file": None, "result_bytes": 0, "result_type": "dropped"}

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.update(table).where(is_waiting).values(failed))
            connection.execute(sa.update(table).where(table.c.result_file == name).values(dropped))

        await self._database.write(write)

    async def close(self, model_id: str, seq_id: int, reason: str) -> None:
        """Note that no number of a model up to this one is waited for any more. What was recorded
        under one all the same, when the connection was lost in the midst of that, has failed: its
        turn is over."""
        models, table = schema.models, schema.operations
        is_late = sa.and_(
            table.c.model_id == model_id, table.c.status == "pending", table.c.seq_id <= seq_id
        )
        failed = {
            "status": "failed",
            "finished_at": time.time(),
            "error": reason,
            "category": "user",
        }

        def write(connection: sa.Connection) -> None:
            closed = sa.update(models).where(models.c.model_id == model_id)
            connection.execute(closed.values(closed_seq_id=seq_id))
            connection.execute(sa.update(table).where(is_late).values(failed))

        await self._database.write(write)

    async def models_with_pending(self) -> Sequence[str]:
        table = schema.operations
        query = sa.select(table.c.model_id).where(table.c.status == "pending").distinct()
        return await self._database.column(query)

    async def mark_retrieved(self, retrieved: Mapping[str, float]) -> None:
        table = schema.operations
        statement = (
            sa.update(table)
            .where(table.c.request_id == sa.bindparam("id"))
            .values(retrieved_at=sa.bindparam("at"))
        )
        rows = [{"id": key, "at": at} for key, at in retrieved.items()]
        await self._database.execute_many(statement, rows)

    def _note_use(self, connection: sa.Connection, operation: OperationRecord) -> bool:
        """Note that a model was used; False when the number was trimmed from its log."""
        used = {
            "of_model": operation.model_id,
            "at": operation.created_at,
            "number": operation.seq_id,
        }
        return bool(self._note_used(connection, used).rowcount == 1)

    def _first(self, connection: sa.Connection, operation: OperationRecord) -> OperationRecord:
        numbered = {"of_model": operation.model_id, "number": operation.seq_id}
        return OperationRecord(**connection.execute(_WITH_NUMBER, numbered).one()._mapping)


def _storable(text: str | None) -> str | None:
    """A sentence of ours, which may quote what a client sent, as every database takes it."""
    if text is None:
        return None
    return text.replace("\0", r"\0").encode(errors="backslashreplace").decode()
