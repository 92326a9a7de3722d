"""Which store this is, and how far it has come."""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import IdentityRecord


class Identity:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self) -> IdentityRecord | None:
        """None in a store that was never bound to a data folder."""
        return await self._database.one(IdentityRecord, sa.select(schema.identity))

    async def put(self, identity: IdentityRecord) -> None:
        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(schema.identity))
            connection.execute(sa.insert(schema.identity).values(row_of(identity)))

        await self._database.write(write)
