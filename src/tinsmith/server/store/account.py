"""The audit log and counted usage of each owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import AuditRecord, UsageRecord

# A sum of integers is a decimal in Postgres.
_SUM = sa.cast(sa.func.sum(schema.usage.c.count), sa.BigInteger).label("count")


class Account:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def list_audit(
        self,
        owner: str,
        area: str | None,
        since: float,
        until: float,
        limit: int | None = None,
        offset: int = 0,
    ) -> Sequence[AuditRecord]:
        """The newest first."""
        table = schema.audit
        query = sa.select(*[c for c in table.c if c.name != "entry_id"]).where(
            table.c.owner == owner, table.c.at >= since, table.c.at < until
        )
        if area is not None:
            query = query.where(table.c.area == area)
        ordered = query.order_by(table.c.at.desc(), table.c.entry_id.desc())
        return await self._database.all(AuditRecord, ordered.limit(limit).offset(offset))

    async def add_usage(self, usage: Sequence[UsageRecord]) -> None:
        table = schema.usage
        statement = self._database.insert(table)
        adding = statement.on_conflict_do_update(
            index_elements=list(table.primary_key.columns),
            set_={"count": table.c.count + statement.excluded["count"]},
        )
        await self._database.execute_many(adding, [row_of(entry) for entry in usage])

    async def list_usage(
        self, owner: str, first_hour: int, end_hour: int, limit: int | None = None, offset: int = 0
    ) -> Sequence[UsageRecord]:
        """What was used in each hour, the runs of a session together."""
        table = schema.usage
        together = [c for c in table.c if c.name not in ("count", "model_id")]
        query = sa.select(*together, _SUM).where(
            table.c.owner == owner, table.c.hour >= first_hour, table.c.hour < end_hour
        )
        ordered = query.group_by(*together).order_by(
            table.c.hour, table.c.session_id, table.c.base_model, table.c.kind
        )
        return await self._database.all(UsageRecord, ordered.limit(limit).offset(offset))

    async def usage_by(
        self, owner: str, by: Literal["run", "model", "day"]
    ) -> Sequence[tuple[str, str, int]]:
        """What was used of each kind, by the run, the base model or the day (counted from 1970)."""
        table = schema.usage
        column: sa.ColumnElement[Any] = {
            "run": table.c.model_id,
            "model": table.c.base_model,
            "day": table.c.hour // 24,
        }[by]
        query = sa.select(column.label("by"), table.c.kind, _SUM).where(table.c.owner == owner)
        return await self._database.all(
            lambda by, kind, count: (str(by), kind, count),
            query.group_by(column, table.c.kind).order_by(column, table.c.kind),
        )
