"""Checkpoints: names for weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, large_texts, row_of
from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    ModelRecord,
    Page,
    WeightsRecord,
)
from tinsmith.server.store.weights import Weights, are_there


class Checkpoints:
    def __init__(self, database: Database, weights: Weights) -> None:
        self._database = database
        self._weights = weights

    async def add(
        self,
        checkpoint: CheckpointRecord,
        model: ModelRecord | None,
        audit: AuditRecord,
        weights: WeightsRecord | None = None,
    ) -> bool:
        """Enter a checkpoint, with its run and its weights where these are new; False when weights
        that were there are gone."""

        def write(connection: sa.Connection) -> bool:
            if weights is None and not are_there(connection, checkpoint.weights_id):
                return False
            self._weights.check_room(connection, checkpoint.owner, checkpoint.size_bytes)
            if model is not None:
                # A request that comes again after its checkpoint was deleted has its run already.
                self._database.put_new(connection, schema.models, row_of(model))
            if weights is not None:
                connection.execute(sa.insert(schema.weights), row_of(weights))
            put_checkpoint(connection, checkpoint)
            connection.execute(sa.insert(schema.audit), row_of(audit))
            return True

        return await self._database.write(write)

    async def get(self, model_id: str, checkpoint_id: str) -> CheckpointRecord | None:
        query = sa.select(schema.checkpoints).where(_checkpoint(model_id, checkpoint_id))
        return await self._database.one(CheckpointRecord, query)

    async def of_model(
        self, model_id: str, limit: int | None = None, offset: int = 0
    ) -> Sequence[CheckpointRecord]:
        """A run's checkpoints, the newest first."""
        query = _of_run(sa.select(schema.checkpoints), model_id)
        return await self._database.all(CheckpointRecord, query.limit(limit).offset(offset))

    async def metadata_bytes(self, model_id: str, limit: int, offset: int) -> int:
        """What the metadata takes of some of a run's checkpoints."""
        metadata = sa.func.length(sa.cast(schema.checkpoints.c.user_metadata, sa.Text))
        some = _of_run(sa.select(metadata.label("size")), model_id).limit(limit).offset(offset)
        (total,) = await self._database.column(sa.select(sa.func.sum(some.subquery().c.size)))
        return int(total or 0)

    async def text_bytes(self, owner: str, above: int) -> int:
        """What the metadata of an owner's checkpoints takes that is longer than so much; looks at
        all."""
        table = schema.checkpoints
        texts = large_texts([table.c.user_metadata], above)
        (total,) = await self._database.column(sa.select(texts).where(table.c.owner == owner))
        return int(total or 0)

    async def newest(
        self, model_id: str, now: float, *, only_public: bool
    ) -> Sequence[CheckpointRecord]:
        """The newest of each type in a run that has not expired, of all or of the published."""
        table = schema.checkpoints
        age = sa.func.row_number().over(
            partition_by=table.c.checkpoint_type,
            order_by=(table.c.created_at.desc(), table.c.checkpoint_id.desc()),
        )
        is_there = sa.or_(table.c.expires_at.is_(None), table.c.expires_at > now)
        query = sa.select(table, age.label("age")).where(table.c.model_id == model_id, is_there)
        if only_public:
            query = query.where(table.c.is_public)
        by_age = query.subquery()
        columns = [by_age.c[column.name] for column in table.c]
        return await self._database.all(
            CheckpointRecord, sa.select(*columns).where(by_age.c.age == 1)
        )

    async def owner_of(self, weights_id: str) -> str:
        """Whose checkpoint has these weights, or one of those who have; "" where none has."""
        table = schema.checkpoints
        query = sa.select(table.c.owner).where(table.c.weights_id == weights_id)
        return str(next(iter(await self._database.column(query.limit(1))), ""))

    async def page_of_owner(self, owner: str, limit: int, offset: int) -> Page[CheckpointRecord]:
        table = schema.checkpoints
        query = sa.select(table).where(table.c.owner == owner)
        order = [table.c.created_at, table.c.model_id, table.c.checkpoint_id]
        return await self._database.page(CheckpointRecord, query, order, limit, offset)

    async def update(
        self, checkpoint: CheckpointRecord, values: Mapping[str, Any], audit: AuditRecord
    ) -> bool:
        """Change a checkpoint; False when another has its name by now, or none."""

        def write(connection: sa.Connection) -> bool:
            changed = sa.update(schema.checkpoints).where(_same(checkpoint)).values(dict(values))
            is_there = connection.execute(changed).rowcount == 1
            if is_there:
                connection.execute(sa.insert(schema.audit), row_of(audit))
            return is_there

        return await self._database.write(write)

    async def delete(self, checkpoint: CheckpointRecord, audit: AuditRecord) -> bool:
        """Delete a checkpoint; False when another has its name by now, or none."""

        def write(connection: sa.Connection) -> bool:
            is_there = _remove(connection, _same(checkpoint))
            if is_there:
                connection.execute(sa.insert(schema.audit), row_of(audit))
            return is_there

        return await self._database.write(write)

    async def restore(
        self, checkpoint: CheckpointRecord, weights: WeightsRecord, audit: AuditRecord
    ) -> None:
        """Enter a deleted checkpoint and its weights again; its name must be free."""

        def write(connection: sa.Connection) -> None:
            self._database.put_new(connection, schema.weights, row_of(weights))
            connection.execute(sa.insert(schema.checkpoints), row_of(checkpoint))
            connection.execute(sa.insert(schema.audit), row_of(audit))

        await self._database.write(write)

    async def expired(self, now: float) -> Sequence[CheckpointRecord]:
        table = schema.checkpoints
        return await self._database.all(
            CheckpointRecord, sa.select(table).where(table.c.expires_at <= now)
        )

    async def storage_of_owner(self, owner: str) -> tuple[int, int]:
        """How many checkpoints an owner has, and their bytes."""
        table = schema.checkpoints
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(table.c.size_bytes), 0))
        return await self._count(query.where(table.c.owner == owner))

    async def _count(self, query: sa.Select[Any]) -> tuple[int, int]:
        def read() -> tuple[int, int]:
            with self._database.connect() as connection:
                row = connection.execute(query).one()
            return int(row[0]), int(row[1])

        return await self._database.in_thread(read)

    async def storage_of_session(self, session_id: str) -> tuple[int, int]:
        """How many checkpoints the runs of a session have, and their bytes."""
        table, models = schema.checkpoints, schema.models
        query = (
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(table.c.size_bytes), 0))
            .join(models, models.c.model_id == table.c.model_id)
            .where(models.c.session_id == session_id)
        )
        return await self._count(query)

    async def storage_by_run(self, owner: str) -> Sequence[tuple[str, int]]:
        """The bytes of each run's checkpoints."""
        table = schema.checkpoints
        # A sum of integers is a decimal in Postgres.
        size = sa.cast(sa.func.sum(table.c.size_bytes), sa.BigInteger).label("size")
        query = sa.select(table.c.model_id, size).where(table.c.owner == owner)
        return await self._database.all(
            lambda model_id, size: (model_id, size),
            query.group_by(table.c.model_id).order_by(table.c.model_id),
        )


def _of_run(query: sa.Select[Any], model_id: str) -> sa.Select[Any]:
    table = schema.checkpoints
    ordered = query.where(table.c.model_id == model_id)
    return ordered.order_by(table.c.created_at.desc(), table.c.checkpoint_id.desc())


def put_checkpoint(connection: sa.Connection, checkpoint: CheckpointRecord) -> None:
    """Enter a checkpoint, in the place of an earlier one of its name."""
    _remove(connection, _checkpoint(checkpoint.model_id, checkpoint.checkpoint_id))
    connection.execute(sa.insert(schema.checkpoints), row_of(checkpoint))


def _remove(connection: sa.Connection, where: sa.ColumnElement[bool]) -> bool:
    """Delete a checkpoint; its weights remember what it was, for bringing it back."""
    table, weights = schema.checkpoints, schema.weights
    found = connection.execute(sa.select(table).where(where)).mappings().first()
    if found is None:
        return False
    connection.execute(sa.delete(table).where(where))
    connection.execute(
        sa.update(weights)
        .where(weights.c.weights_id == found["weights_id"])
        .values(deleted_checkpoint=dict(found))
    )
    return True


def _checkpoint(model_id: str, checkpoint_id: str) -> sa.ColumnElement[bool]:
    table = schema.checkpoints
    return sa.and_(table.c.model_id == model_id, table.c.checkpoint_id == checkpoint_id)


def _same(checkpoint: CheckpointRecord) -> sa.ColumnElement[bool]:
    """The checkpoint that was read, and no later one of its name."""
    is_of_name = _checkpoint(checkpoint.model_id, checkpoint.checkpoint_id)
    return sa.and_(is_of_name, schema.checkpoints.c.weights_id == checkpoint.weights_id)
