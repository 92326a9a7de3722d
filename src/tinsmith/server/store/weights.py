"""Weights, and the checkpoints that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.base import (
    AuditRecord,
    CheckpointRecord,
    ModelRecord,
    Page,
    WeightsRecord,
)
from tinsmith.server.store.database import Database, fields


class WeightTables(Database):
    """See `base.Store`."""

    async def get_weights(self, weights_id: str) -> WeightsRecord | None:
        table = schema.weights
        return await self.one(
            WeightsRecord, sa.select(table).where(table.c.weights_id == weights_id)
        )

    async def list_weights(self) -> Sequence[str]:
        return await self.column(sa.select(schema.weights.c.weights_id))

    async def unreferenced_weights(self) -> Sequence[str]:
        return await self.column(_unreferenced())

    async def forget_weights(self, weights_ids: Sequence[str]) -> Sequence[str]:
        column = schema.weights.c.weights_id

        def write(connection: sa.Connection) -> list[str]:
            # Somebody may have begun to use one since it was found.
            still = _unreferenced().where(column.in_(list(weights_ids)))
            stray = list(connection.execute(still).scalars())
            connection.execute(sa.delete(schema.weights).where(column.in_(stray)))
            return stray

        return await self.write(write)

    async def hold_weights(self, request_id: str, weights_id: str) -> bool:
        operations, weights = schema.operations, schema.weights

        def write(connection: sa.Connection) -> bool:
            found = sa.select(weights.c.weights_id).where(weights.c.weights_id == weights_id)
            if connection.execute(found).first() is None:
                return False
            connection.execute(
                sa.update(operations)
                .where(operations.c.request_id == request_id)
                .values(weights_id=weights_id)
            )
            return True

        return await self.write(write)

    async def add_checkpoint(
        self, checkpoint: CheckpointRecord, model: ModelRecord | None, audit: AuditRecord
    ) -> None:
        def write(connection: sa.Connection) -> None:
            if model is not None:
                connection.execute(sa.insert(schema.models).values(fields(model)))
            self.replace(connection, schema.checkpoints, fields(checkpoint))
            connection.execute(sa.insert(schema.audit).values(fields(audit)))

        await self.write(write)

    async def get_checkpoint(self, model_id: str, checkpoint_id: str) -> CheckpointRecord | None:
        query = sa.select(schema.checkpoints).where(_checkpoint(model_id, checkpoint_id))
        return await self.one(CheckpointRecord, query)

    async def list_checkpoints(self, model_id: str) -> Sequence[CheckpointRecord]:
        table = schema.checkpoints
        query = sa.select(table).where(table.c.model_id == model_id)
        return await self.all(CheckpointRecord, query.order_by(table.c.created_at.desc()))

    async def list_owner_checkpoints(self, owner: str, limit: int, offset: int) -> Page:
        table = schema.checkpoints
        query = sa.select(table).where(table.c.owner == owner)
        order = [table.c.created_at, table.c.model_id, table.c.checkpoint_id]
        return await self.page(CheckpointRecord, query, order, limit, offset)

    async def set_checkpoint(
        self, model_id: str, checkpoint_id: str, values: Mapping[str, Any], audit: AuditRecord
    ) -> None:
        def write(connection: sa.Connection) -> None:
            connection.execute(
                sa.update(schema.checkpoints)
                .where(_checkpoint(model_id, checkpoint_id))
                .values(dict(values))
            )
            connection.execute(sa.insert(schema.audit).values(fields(audit)))

        await self.write(write)

    async def delete_checkpoint(
        self, model_id: str, checkpoint_id: str, audit: AuditRecord
    ) -> bool:
        def write(connection: sa.Connection) -> bool:
            where = _checkpoint(model_id, checkpoint_id)
            found = connection.execute(sa.delete(schema.checkpoints).where(where)).rowcount == 1
            if found:
                connection.execute(sa.insert(schema.audit).values(fields(audit)))
            return found

        return await self.write(write)

    async def expired_checkpoints(self, now: float) -> Sequence[CheckpointRecord]:
        table = schema.checkpoints
        return await self.all(CheckpointRecord, sa.select(table).where(table.c.expires_at <= now))

    async def storage_of(self, owner: str) -> tuple[int, int]:
        table = schema.checkpoints
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(table.c.size_bytes), 0))

        def read() -> tuple[int, int]:
            with self.connect() as connection:
                row = connection.execute(query.where(table.c.owner == owner)).one()
            return int(row[0]), int(row[1])

        return await self.read(read)


def _unreferenced() -> sa.Select[Any]:
    query = sa.select(schema.weights.c.weights_id)
    for column in (
        schema.checkpoints.c.weights_id,
        schema.samplers.c.weights_id,
        schema.models.c.snapshot_weights_id,
        schema.models.c.previous_snapshot_weights_id,
        schema.operations.c.weights_id,
    ):
        query = query.where(~sa.exists().where(column == schema.weights.c.weights_id))
    return query


def _checkpoint(model_id: str, checkpoint_id: str) -> sa.ColumnElement[bool]:
    table = schema.checkpoints
    return sa.and_(table.c.model_id == model_id, table.c.checkpoint_id == checkpoint_id)
