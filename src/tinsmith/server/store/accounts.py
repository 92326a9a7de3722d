"""Keys, secrets, the audit log and counted usage."""

from __future__ import annotations

import dataclasses
import secrets as random
from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.base import (
    AuditRecord,
    KeyRecord,
    UsageRecord,
)
from tinsmith.server.store.database import Database, fields


class AccountTables(Database):
    """See `base.Store`."""

    async def secret(self, name: str) -> bytes:
        def write(connection: sa.Connection) -> bytes:
            table = schema.secrets
            self.put_new(connection, table, {"name": name, "value": random.token_bytes(32)})
            found = connection.execute(sa.select(table.c.value).where(table.c.name == name))
            return bytes(found.scalar_one())

        return await self.write(write)

    async def add_key(self, key: KeyRecord) -> KeyRecord:
        def write(connection: sa.Connection) -> KeyRecord:
            values = {k: v for k, v in fields(key).items() if k != "key_id"}
            result = connection.execute(
                sa.insert(schema.keys).values(values).returning(schema.keys.c.key_id)
            )
            return dataclasses.replace(key, key_id=result.scalar_one())

        return await self.write(write)

    async def list_keys(self) -> Sequence[KeyRecord]:
        query = sa.select(schema.keys).order_by(schema.keys.c.key_id)
        return await self.all(KeyRecord, query)

    async def revoke_key(self, key_id: int, at: float) -> bool:
        table = schema.keys
        statement = (
            sa.update(table)
            .where(table.c.key_id == key_id, table.c.revoked_at.is_(None))
            .values(revoked_at=at)
        )
        return await self.execute(statement) == 1

    async def add_audit(self, entry: AuditRecord) -> None:
        await self.execute(sa.insert(schema.audit).values(fields(entry)))

    async def list_audit(
        self, owner: str, area: str | None, since: float, until: float
    ) -> Sequence[AuditRecord]:
        table = schema.audit
        query = sa.select(*[c for c in table.c if c.name != "entry_id"]).where(
            table.c.owner == owner, table.c.at >= since, table.c.at < until
        )
        if area is not None:
            query = query.where(table.c.area == area)
        return await self.all(
            AuditRecord, query.order_by(table.c.at.desc(), table.c.entry_id.desc())
        )

    async def add_usage(self, usage: Sequence[UsageRecord]) -> None:
        table = schema.usage
        statement = self.insert(table)
        adding = statement.on_conflict_do_update(
            index_elements=list(table.primary_key.columns),
            set_={"count": table.c.count + statement.excluded["count"]},
        )
        await self.execute_many(adding, [fields(entry) for entry in usage])

    async def list_usage(self, owner: str, first_hour: int, end_hour: int) -> Sequence[UsageRecord]:
        table = schema.usage
        query = sa.select(table).where(
            table.c.owner == owner, table.c.hour >= first_hour, table.c.hour < end_hour
        )
        return await self.all(
            UsageRecord,
            query.order_by(table.c.hour, table.c.session_id, table.c.base_model, table.c.kind),
        )
