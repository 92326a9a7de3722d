"""Sessions: when they began, gave a sign of life, and ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import Page, SessionRecord

TEXTS = ("tags", "user_metadata", "project_id", "display_name", "sdk_version", "finish_detail")
"""The columns that a client gives what it likes."""


class Sessions:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, session: SessionRecord) -> None:
        await self._database.execute(sa.insert(schema.sessions).values(row_of(session)))

    async def get(self, session_id: str) -> SessionRecord | None:
        table = schema.sessions
        return await self._database.one(
            SessionRecord, sa.select(table).where(table.c.session_id == session_id)
        )

    async def page_of_owner(self, owner: str, limit: int, offset: int) -> Page[SessionRecord]:
        table = schema.sessions
        query = sa.select(table).where(table.c.owner == owner)
        return await self._database.page(
            SessionRecord, query, [table.c.created_at, table.c.session_id], limit, offset
        )

    async def older(
        self, owner: str, than: SessionRecord | None, limit: int
    ) -> Sequence[SessionRecord]:
        """The newest of an owner's sessions, or those that come after one of them."""
        table = schema.sessions
        query = sa.select(table).where(table.c.owner == owner)
        if than is not None:
            is_earlier = table.c.created_at < than.created_at
            is_next = (table.c.created_at == than.created_at) & (
                table.c.session_id < than.session_id
            )
            query = query.where(is_earlier | is_next)
        ordered = query.order_by(table.c.created_at.desc(), table.c.session_id.desc())
        return await self._database.all(SessionRecord, ordered.limit(limit))

    async def metadata_of(self, owner: str, session_ids: Sequence[str]) -> dict[str, Any]:
        """The metadata of some of an owner's sessions, by their ids."""
        table = schema.sessions
        query = sa.select(table.c.session_id, table.c.user_metadata).where(
            table.c.owner == owner, table.c.session_id.in_(session_ids)
        )
        found = await self._database.all(
            lambda session_id, user_metadata: (session_id, user_metadata), query
        )
        return dict(found)

    async def count_before(self, session: SessionRecord) -> int:
        """How many sessions its owner had begun before it."""
        table = schema.sessions
        query = sa.select(sa.func.count()).where(
            table.c.owner == session.owner, table.c.created_at < session.created_at
        )

        def read() -> int:
            with self._database.connect() as connection:
                return int(connection.execute(query).scalar_one())

        return await self._database.in_thread(read)

    async def held_by(self, owner: str) -> tuple[int, int]:
        """How many sessions an owner has, and what the texts in them take; looks at them all."""
        table = schema.sessions
        sizes = [
            sa.func.coalesce(sa.func.length(sa.cast(table.c[name], sa.Text)), 0) for name in TEXTS
        ]
        query = sa.select(sa.func.count(), sa.func.sum(sum(sizes, start=sa.literal(0))))

        def read() -> tuple[int, int]:
            with self._database.connect() as connection:
                number, total = connection.execute(query.where(table.c.owner == owner)).one()
            return int(number), int(total or 0)

        return await self._database.in_thread(read)

    async def seen_since(self, moment: float) -> Sequence[str]:
        """The ids of active sessions that gave a sign of life since a moment."""
        table = schema.sessions
        query = sa.select(table.c.session_id).where(table.c.state == "active")
        return await self._database.column(query.where(table.c.last_seen_at > moment))

    async def update(self, session_id: str, values: Mapping[str, Any]) -> None:
        table = schema.sessions
        await self._database.execute(
            sa.update(table).where(table.c.session_id == session_id).values(dict(values))
        )

    async def touch(self, seen: Mapping[str, float]) -> None:
        table = schema.sessions
        statement = (
            sa.update(table)
            .where(table.c.session_id == sa.bindparam("id"))
            .values(last_seen_at=sa.bindparam("at"))
        )
        await self._database.execute_many(
            statement, [{"id": key, "at": at} for key, at in seen.items()]
        )
