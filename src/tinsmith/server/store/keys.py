"""API keys, of which only hashes are kept, and the server's own secrets."""

from __future__ import annotations

import dataclasses
import secrets as random
from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import KeyRecord


class Keys:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, key: KeyRecord) -> KeyRecord:
        def write(connection: sa.Connection) -> KeyRecord:
            values = {k: v for k, v in row_of(key).items() if k != "key_id"}
            result = connection.execute(
                sa.insert(schema.keys).values(values).returning(schema.keys.c.key_id)
            )
            return dataclasses.replace(key, key_id=result.scalar_one())

        return await self._database.write(write)

    async def list(self) -> Sequence[KeyRecord]:
        query = sa.select(schema.keys).order_by(schema.keys.c.key_id)
        return await self._database.all(KeyRecord, query)

    async def revoke(self, key_id: int, at: float) -> bool:
        table = schema.keys
        statement = (
            sa.update(table)
            .where(table.c.key_id == key_id, table.c.revoked_at.is_(None))
            .values(revoked_at=at)
        )
        return await self._database.execute(statement) == 1

    async def secret(self, name: str) -> bytes:
        """32 random bytes, made on first use and the same ever after."""

        def write(connection: sa.Connection) -> bytes:
            table = schema.secrets
            self._database.put_new(
                connection, table, {"name": name, "value": random.token_bytes(32)}
            )
            found = connection.execute(sa.select(table.c.value).where(table.c.name == name))
            return bytes(found.scalar_one())

        return await self._database.write(write)
