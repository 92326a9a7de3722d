"""Sessions, and the samplers that belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.base import (
    Page,
    SamplerRecord,
    SessionRecord,
)
from tinsmith.server.store.database import Database, fields


class SessionTables(Database):
    """See `base.Store`."""

    async def add_session(self, session: SessionRecord) -> None:
        await self.execute(sa.insert(schema.sessions).values(fields(session)))

    async def get_session(self, session_id: str) -> SessionRecord | None:
        table = schema.sessions
        return await self.one(
            SessionRecord, sa.select(table).where(table.c.session_id == session_id)
        )

    async def list_sessions(self, owner: str, limit: int, offset: int) -> Page:
        table = schema.sessions
        query = sa.select(table).where(table.c.owner == owner)
        return await self.page(
            SessionRecord, query, [table.c.created_at, table.c.session_id], limit, offset
        )

    async def active_sessions(self) -> Sequence[SessionRecord]:
        table = schema.sessions
        return await self.all(SessionRecord, sa.select(table).where(table.c.state == "active"))

    async def sessions_of(self, owner: str) -> Sequence[SessionRecord]:
        table = schema.sessions
        query = sa.select(table).where(table.c.owner == owner)
        return await self.all(
            SessionRecord, query.order_by(table.c.created_at.desc(), table.c.session_id.desc())
        )

    async def set_session(self, session_id: str, values: Mapping[str, Any]) -> None:
        table = schema.sessions
        await self.execute(
            sa.update(table).where(table.c.session_id == session_id).values(dict(values))
        )

    async def touch_sessions(self, seen: Mapping[str, float]) -> None:
        table = schema.sessions
        statement = (
            sa.update(table)
            .where(table.c.session_id == sa.bindparam("id"))
            .values(last_seen_at=sa.bindparam("at"))
        )
        await self.execute_many(statement, [{"id": key, "at": at} for key, at in seen.items()])

    async def add_sampler(self, sampler: SamplerRecord) -> SamplerRecord:
        table = schema.samplers

        def write(connection: sa.Connection) -> SamplerRecord:
            if self.put_new(connection, table, fields(sampler)):
                return sampler
            found = connection.execute(
                sa.select(table).where(
                    table.c.session_id == sampler.session_id,
                    table.c.sampling_session_seq_id == sampler.sampling_session_seq_id,
                )
            )
            return SamplerRecord(**found.one()._mapping)

        return await self.write(write)

    async def get_sampler(self, sampler_id: str) -> SamplerRecord | None:
        table = schema.samplers
        return await self.one(
            SamplerRecord, sa.select(table).where(table.c.sampler_id == sampler_id)
        )

    async def samplers_of_session(self, session_id: str) -> Sequence[SamplerRecord]:
        table = schema.samplers
        query = sa.select(table).where(table.c.session_id == session_id)
        return await self.all(SamplerRecord, query.order_by(table.c.sampling_session_seq_id))

    async def join_sampler(self, sampler_id: str) -> int:
        table = schema.samplers

        def write(connection: sa.Connection) -> int:
            row = connection.execute(
                sa.update(table)
                .where(table.c.sampler_id == sampler_id)
                .values(num_clients=table.c.num_clients + 1)
                .returning(table.c.num_clients)
            )
            return int(row.scalar_one()) - 1

        return await self.write(write)

    async def silent_sessions_with_samplers(self, seen_before: float) -> Sequence[str]:
        sessions, samplers = schema.sessions, schema.samplers
        query = sa.select(sessions.c.session_id).where(
            sessions.c.last_seen_at < seen_before,
            sa.exists().where(samplers.c.session_id == sessions.c.session_id),
        )
        return await self.column(query)

    async def forget_samplers(self, session_id: str) -> None:
        table = schema.samplers
        await self.execute(sa.delete(table).where(table.c.session_id == session_id))
