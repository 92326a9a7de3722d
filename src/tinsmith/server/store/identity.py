"""Which store this is, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable

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

    async def advance(self) -> IdentityRecord:
        """Count the epoch up; the store must have an identity."""
        table = schema.identity
        counted = sa.update(table).values(epoch=table.c.epoch + 1).returning(*table.c)
        return await self._database.write(
            lambda connection: IdentityRecord(**connection.execute(counted).one()._mapping)
        )

    def count_commits(self, tell: Callable[[int], None]) -> None:
        """From now on `tell` hears the position of every commit before its writers do."""
        self._database.count_commits(tell)

    async def ensure(self, identity: IdentityRecord) -> None:
        """Take an identity where there is none."""

        def write(connection: sa.Connection) -> None:
            if connection.dialect.name == "postgresql":
                # Another server may be about to do the same.
                connection.execute(sa.text("LOCK TABLE identity IN SHARE ROW EXCLUSIVE MODE"))
            if connection.execute(sa.select(schema.identity)).first() is None:
                connection.execute(sa.insert(schema.identity).values(row_of(identity)))

        await self._database.write(write)

    async def put(self, identity: IdentityRecord) -> None:
        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(schema.identity))
            connection.execute(sa.insert(schema.identity).values(row_of(identity)))

        await self._database.write(write)
