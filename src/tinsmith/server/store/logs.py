"""Models and their logs: operations from their recording to the end of their results."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.base import (
    CustomLossRecord,
    Finish,
    ModelRecord,
    OperationRecord,
    Page,
    StoreDamagedError,
    WeightsRecord,
)
from tinsmith.server.store.blobs import INLINE_BYTES
from tinsmith.server.store.database import Database, fields

logger = logging.getLogger(__name__)

_USED = (
    sa.update(schema.models)
    .where(schema.models.c.model_id == sa.bindparam("of_model"))
    .values(last_request_at=sa.bindparam("at"))
)
_ENDED = sa.update(schema.operations).where(
    schema.operations.c.request_id == sa.bindparam("of_request"),
    schema.operations.c.status == "pending",
)
"""Statements that run for every operation; built once, because that costs more than they do."""

_DROPPED_AT_ONCE = 500
_LIGHT_COLUMNS = [c for c in schema.operations.c if c.name not in ("payload", "result")]


class LogTables(Database):
    """See `base.Store`."""

    async def record(
        self, operation: OperationRecord, model: ModelRecord | None = None
    ) -> tuple[OperationRecord, bool]:
        values = fields(operation)
        if operation.payload is not None and len(operation.payload) > INLINE_BYTES:
            name = f"{operation.request_id}.payload"
            values["payload_file"] = await self.read(self.blobs.write, name, operation.payload)
            values["payload"] = None

        def write(connection: sa.Connection) -> tuple[OperationRecord, bool]:
            is_new = self.put_new(connection, schema.operations, values)
            if is_new and model is not None:
                connection.execute(sa.insert(schema.models).values(fields(model)))
            elif is_new:
                used = {"of_model": operation.model_id, "at": operation.created_at}
                connection.execute(_USED, used)
            return (operation if is_new else self._first(connection, operation)), is_new

        recorded, is_new = await self.write(write)
        if not is_new and values["payload_file"] is not None:
            await self.read(self.blobs.delete, [values["payload_file"]])
        return recorded, is_new

    async def finish(self, finishes: Sequence[Finish]) -> None:
        rows = [await self._end_row(finish) for finish in finishes]

        def write(connection: sa.Connection) -> None:
            for finish, row in zip(finishes, rows, strict=True):
                self._finish_one(connection, finish, row)

        await self.write(write)

    async def _end_row(self, finish: Finish) -> dict[str, Any]:
        row: dict[str, Any] = {
            "status": finish.status,
            "finished_at": finish.finished_at,
            "result_type": finish.result_type,
            "result": finish.result,
            "result_bytes": len(finish.result or b""),
            "error": finish.error,
            "category": finish.category,
            "weights_id": finish.used_weights_id,
        }
        if finish.result is not None and len(finish.result) > INLINE_BYTES:
            name = f"{finish.request_id}.result"
            row["result_file"] = await self.read(self.blobs.write, name, finish.result)
            row["result"] = None
        return row

    def _finish_one(self, connection: sa.Connection, finish: Finish, row: dict[str, Any]) -> None:
        ended = connection.execute(_ENDED, {"of_request": finish.request_id, **row})
        if ended.rowcount != 1:
            return
        if finish.weights is not None:
            connection.execute(sa.insert(schema.weights).values(fields(finish.weights)))
        if finish.checkpoint is not None:
            self.replace(connection, schema.checkpoints, fields(finish.checkpoint))
        if finish.sampler is not None:
            connection.execute(sa.insert(schema.samplers).values(fields(finish.sampler)))
        if finish.audit is not None:
            connection.execute(sa.insert(schema.audit).values(fields(finish.audit)))

    async def get_operation(self, request_id: str) -> OperationRecord | None:
        table = schema.operations
        columns = [c for c in table.c if c.name != "payload"]
        query = sa.select(*columns).where(table.c.request_id == request_id)
        found = await self.one(OperationRecord, query)
        if found is None or found.result_file is None:
            return found
        try:
            result = await self.read(self.blobs.read, found.result_file)
        except StoreDamagedError:
            logger.exception("the result of %s is lost", request_id)
            return dataclasses.replace(found, result_type="dropped")
        return dataclasses.replace(found, result=result)

    async def read_log(self, model_id: str, after_seq_id: int) -> Sequence[OperationRecord]:
        table = schema.operations
        query = sa.select(*_LIGHT_COLUMNS).where(
            table.c.model_id == model_id, table.c.seq_id > after_seq_id
        )
        return await self.all(OperationRecord, query.order_by(table.c.seq_id))

    async def read_payload(self, request_id: str) -> bytes:
        table = schema.operations
        query = sa.select(table.c.payload, table.c.payload_file)

        def read() -> bytes:
            with self.connect() as connection:
                row = connection.execute(query.where(table.c.request_id == request_id)).one()
            return (
                bytes(row.payload)
                if row.payload_file is None
                else self.blobs.read(row.payload_file)
            )

        return await self.read(read)

    async def models_with_pending(self) -> Sequence[str]:
        table = schema.operations
        query = sa.select(table.c.model_id).where(table.c.status == "pending").distinct()
        return await self.column(query)

    async def get_model(self, model_id: str) -> ModelRecord | None:
        table = schema.models
        return await self.one(ModelRecord, sa.select(table).where(table.c.model_id == model_id))

    async def list_models(
        self, owner: str, limit: int, offset: int, project_id: str | None = None
    ) -> Page:
        table = schema.models
        query = sa.select(table).where(table.c.owner == owner)
        if project_id is not None:
            query = query.where(table.c.project_id == project_id)
        return await self.page(
            ModelRecord, query, [table.c.created_at, table.c.model_id], limit, offset
        )

    async def models_of_session(self, session_id: str) -> Sequence[ModelRecord]:
        table = schema.models
        query = sa.select(table).where(table.c.session_id == session_id)
        return await self.all(ModelRecord, query.order_by(table.c.model_seq_id))

    async def set_model(self, model_id: str, values: Mapping[str, Any]) -> None:
        table = schema.models
        await self.execute(
            sa.update(table).where(table.c.model_id == model_id).values(dict(values))
        )

    async def record_snapshot(self, model_id: str, seq_id: int, weights: WeightsRecord) -> None:
        models, table = schema.models, schema.operations

        def write(connection: sa.Connection) -> list[str]:
            connection.execute(sa.insert(schema.weights).values(fields(weights)))
            present = connection.execute(
                sa.select(
                    models.c.snapshot_seq_id,
                    models.c.snapshot_weights_id,
                    models.c.previous_snapshot_seq_id,
                ).where(models.c.model_id == model_id)
            ).one()
            connection.execute(
                sa.update(models)
                .where(models.c.model_id == model_id)
                .values(
                    snapshot_seq_id=seq_id,
                    snapshot_weights_id=weights.weights_id,
                    previous_snapshot_seq_id=present.snapshot_seq_id,
                    previous_snapshot_weights_id=present.snapshot_weights_id,
                )
            )
            return _drop_payloads(
                connection,
                sa.and_(
                    table.c.model_id == model_id,
                    # Those before went with the last snapshot; a long log is not read again.
                    table.c.seq_id > present.previous_snapshot_seq_id,
                    table.c.seq_id <= present.snapshot_seq_id,
                    table.c.status != "pending",
                ),
            )

        names = await self.write(write)
        await self.read(self.blobs.delete, names)

    async def revert_snapshot(self, model_id: str) -> None:
        table = schema.models
        await self.execute(
            sa.update(table)
            .where(table.c.model_id == model_id)
            .values(
                snapshot_seq_id=table.c.previous_snapshot_seq_id,
                snapshot_weights_id=table.c.previous_snapshot_weights_id,
            )
        )

    async def forgotten_models(self, seen_before: float) -> Sequence[str]:
        sessions, models, operations = schema.sessions, schema.models, schema.operations
        has_pending = sa.exists().where(
            operations.c.model_id == models.c.model_id, operations.c.status == "pending"
        )
        query = (
            sa.select(models.c.model_id)
            .join(sessions, sessions.c.session_id == models.c.session_id)
            .where(models.c.retired_at.is_(None), sessions.c.last_seen_at < seen_before)
            .where(~has_pending)
        )
        return await self.column(query)

    async def retire_model(self, model_id: str, at: float) -> None:
        models = schema.models

        def write(connection: sa.Connection) -> list[str]:
            connection.execute(
                sa.update(models)
                .where(models.c.model_id == model_id)
                .values(retired_at=at, snapshot_weights_id=None, previous_snapshot_weights_id=None)
            )
            return _drop_payloads(connection, schema.operations.c.model_id == model_id)

        names = await self.write(write)
        await self.read(self.blobs.delete, names)

    async def mark_retrieved(self, retrieved: Mapping[str, float]) -> None:
        table = schema.operations
        statement = (
            sa.update(table)
            .where(table.c.request_id == sa.bindparam("id"))
            .values(retrieved_at=sa.bindparam("at"))
        )
        rows = [{"id": key, "at": at} for key, at in retrieved.items()]
        await self.execute_many(statement, rows)

    async def drop_results(
        self, *, retrieved_before: float, finished_before: float, max_bytes: int
    ) -> int:
        table = schema.operations
        is_old = sa.or_(
            table.c.finished_at < finished_before,
            sa.func.coalesce(table.c.retrieved_at, math.inf) < retrieved_before,
        )
        kept = sa.and_(table.c.result_bytes > 0, ~is_old)
        newest_first = sa.func.sum(table.c.result_bytes).over(
            order_by=[table.c.finished_at.desc(), table.c.request_id]
        )
        sized = sa.select(
            table.c.request_id, table.c.result_file, newest_first.label("together")
        ).where(kept)

        def read() -> list[tuple[str, str | None]]:
            # Outside of the writing thread: whole tables are looked at, and others want to write.
            with self.connect() as connection:
                old = sa.select(table.c.request_id, table.c.result_file)
                drop = [*connection.execute(old.where(table.c.result_bytes > 0, is_old))]
                held = connection.execute(
                    sa.select(sa.func.coalesce(sa.func.sum(table.c.result_bytes), 0)).where(kept)
                ).scalar_one()
                if held > max_bytes:
                    beyond = sized.subquery()
                    excess = sa.select(beyond.c.request_id, beyond.c.result_file)
                    drop += connection.execute(excess.where(beyond.c.together > max_bytes))
            return [(row.request_id, row.result_file) for row in drop]

        drop = await self.read(read)
        for start in range(0, len(drop), _DROPPED_AT_ONCE):
            part = drop[start : start + _DROPPED_AT_ONCE]
            ids = [request_id for request_id, _ in part]
            await self.execute(
                sa.update(table)
                .where(table.c.request_id.in_(ids))
                .values(result=None, result_file=None, result_bytes=0, result_type="dropped")
            )
            await self.read(self.blobs.delete, [name for _, name in part if name])
        return len(drop)

    async def add_custom_loss(
        self, loss: CustomLossRecord, operation: OperationRecord
    ) -> OperationRecord:
        def write(connection: sa.Connection) -> OperationRecord:
            if not self.put_new(connection, schema.operations, fields(operation)):
                return self._first(connection, operation)
            connection.execute(sa.insert(schema.custom_losses).values(fields(loss)))
            return operation

        return await self.write(write)

    async def get_custom_loss(self, loss_id: str) -> CustomLossRecord | None:
        table = schema.custom_losses
        return await self.one(CustomLossRecord, sa.select(table).where(table.c.loss_id == loss_id))

    def _first(self, connection: sa.Connection, operation: OperationRecord) -> OperationRecord:
        table = schema.operations
        found = connection.execute(
            sa.select(*_LIGHT_COLUMNS).where(
                table.c.model_id == operation.model_id, table.c.seq_id == operation.seq_id
            )
        )
        return OperationRecord(**found.one()._mapping)


def _drop_payloads(connection: sa.Connection, which: sa.ColumnElement[bool]) -> list[str]:
    """Forget the requests of operations; the names of the files that they were in. Rows that have
    nothing to drop any more are left alone."""
    table = schema.operations
    has_any = sa.or_(
        table.c.payload.is_not(None),
        table.c.payload_file.is_not(None),
        table.c.weights_id.is_not(None),
    )
    files = connection.execute(
        sa.select(table.c.payload_file).where(which, table.c.payload_file.is_not(None))
    )
    names = list(files.scalars())
    connection.execute(
        sa.update(table)
        .where(which, has_any)
        .values(payload=None, payload_file=None, weights_id=None)
    )
    return names
