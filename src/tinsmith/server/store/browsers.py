"""Browsers that were let in with a key."""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import BrowserSessionRecord

MAX_PER_KEY = 100
"""Beyond them, the oldest session of a key ends when another begins."""


class Browsers:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, session: BrowserSessionRecord) -> None:
        """Record a session, and forget those that are over, and the oldest of too many."""
        table = schema.browser_sessions
        of_key = table.c.key_id == session.key_id
        newest = (
            sa.select(table.c.cookie_hash)
            .where(of_key)
            .order_by(table.c.created_at.desc(), table.c.cookie_hash)
            .limit(MAX_PER_KEY - 1)
        )

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(table).where(table.c.expires_at < session.created_at))
            connection.execute(sa.delete(table).where(of_key, table.c.cookie_hash.not_in(newest)))
            connection.execute(sa.insert(table).values(row_of(session)))

        await self._database.write(write)

    async def get(self, cookie_hash: str) -> BrowserSessionRecord | None:
        table = schema.browser_sessions
        query = sa.select(table).where(table.c.cookie_hash == cookie_hash)
        return await self._database.one(BrowserSessionRecord, query)

    async def delete(self, cookie_hash: str) -> None:
        table = schema.browser_sessions
        await self._database.execute(sa.delete(table).where(table.c.cookie_hash == cookie_hash))
