"""Models: what they are, and the snapshots that their logs begin from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.blobs import Blobs
from tinsmith.server.store.database import Database, large_texts, row_of
from tinsmith.server.store.records import ModelRecord, Page, WeightsRecord

_MODEL = sa.select(schema.models).where(schema.models.c.model_id == sa.bindparam("of_model"))
_MODELS = sa.select(schema.models).where(
    schema.models.c.model_id.in_(sa.bindparam("of_models", expanding=True))
)

_SMALL_BYTES = 4096
"""Most that made a model which is read though nobody has asked for it."""


class Models:
    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs

    async def get(self, model_id: str) -> ModelRecord | None:
        return await self._database.one(ModelRecord, _MODEL, {"of_model": model_id})

    async def get_many(self, model_ids: Sequence[str]) -> Sequence[ModelRecord]:
        return await self._database.all(ModelRecord, _MODELS, {"of_models": model_ids})

    async def used_since(self, at: float, most: int) -> Sequence[str]:
        """The ids of the models of active sessions that had a request since a moment, those used
        last first; without those that were made by a large request, which have much metadata."""
        table, sessions, operations = schema.models, schema.sessions, schema.operations
        is_first = sa.and_(
            operations.c.model_id == table.c.model_id,
            operations.c.seq_id == 0,
            operations.c.payload_bytes <= _SMALL_BYTES,
        )
        query = (
            sa.select(table.c.model_id)
            .join(sessions, sessions.c.session_id == table.c.session_id)
            .join(operations, is_first)
            .where(sessions.c.state == "active", table.c.last_request_at >= at)
            .order_by(table.c.last_request_at.desc())
        )
        return await self._database.column(query.limit(most))

    async def page_of_owner(
        self, owner: str, limit: int, offset: int, project_id: str | None = None
    ) -> Page[ModelRecord]:
        table = schema.models
        query = sa.select(table).where(table.c.owner == owner)
        if project_id is not None:
            query = query.where(table.c.project_id == project_id)
        return await self._database.page(
            ModelRecord, query, [table.c.created_at, table.c.model_id], limit, offset
        )

    async def text_bytes(self, owner: str, above: int) -> int:
        """What the texts of an owner's models take that are longer than so much; looks at all."""
        table = schema.models
        texts = large_texts([table.c.user_metadata, table.c.project_id], above)
        (total,) = await self._database.column(sa.select(texts).where(table.c.owner == owner))
        return int(total or 0)

    async def of_session(self, session_id: str) -> Sequence[ModelRecord]:
        table = schema.models
        query = sa.select(table).where(table.c.session_id == session_id)
        return await self._database.all(ModelRecord, query.order_by(table.c.model_seq_id))

    async def count_in_active_sessions(self, owner: str) -> int:
        models, sessions = schema.models, schema.sessions
        query = (
            sa.select(models.c.model_id)
            .join(sessions, sessions.c.session_id == models.c.session_id)
            .where(sessions.c.owner == owner, sessions.c.state == "active")
        )
        return len(await self._database.column(query))

    async def update(self, model_id: str, values: Mapping[str, Any]) -> None:
        table = schema.models
        await self._database.execute(
            sa.update(table).where(table.c.model_id == model_id).values(dict(values))
        )

    async def record_snapshot(self, model_id: str, seq_id: int, weights: WeightsRecord) -> None:
        """Make `weights` the model's snapshot, keep the one before it as the previous one, and
        drop the payloads that are older than that."""
        models, table = schema.models, schema.operations

        def write(connection: sa.Connection) -> list[str]:
            connection.execute(sa.insert(schema.weights), row_of(weights))
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

        names = await self._database.write(write)
        await self._blobs.delete(names)

    async def revert_snapshot(self, model_id: str) -> None:
        """Forget the model's snapshot, which is damaged: the previous one takes its place."""
        table = schema.models
        await self._database.execute(
            sa.update(table)
            .where(table.c.model_id == model_id)
            .values(
                snapshot_seq_id=table.c.previous_snapshot_seq_id,
                snapshot_weights_id=table.c.previous_snapshot_weights_id,
            )
        )

    async def forgotten(self, seen_before: float) -> Sequence[str]:
        """Models with a state whose sessions have been silent since before a moment."""
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
        return await self._database.column(query)

    async def retire(self, model_id: str, at: float) -> None:
        """Drop a model's snapshot and what is left of its log's payloads."""
        models = schema.models

        def write(connection: sa.Connection) -> list[str]:
            connection.execute(
                sa.update(models)
                .where(models.c.model_id == model_id)
                .values(retired_at=at, snapshot_weights_id=None, previous_snapshot_weights_id=None)
            )
            return _drop_payloads(connection, schema.operations.c.model_id == model_id)

        names = await self._database.write(write)
        await self._blobs.delete(names)


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
