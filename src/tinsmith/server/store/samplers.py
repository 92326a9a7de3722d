"""Samplers, named or not, and the clients that share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import SamplerRecord, SamplerStatsRecord
from tinsmith.server.store.weights import are_there


class Samplers:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, sampler: SamplerRecord) -> SamplerRecord | None:
        """The sampler, or the earlier one with the same session and sequence number; None when its
        weights are gone."""
        table = schema.samplers

        def write(connection: sa.Connection) -> SamplerRecord | None:
            if sampler.weights_id is not None and not are_there(connection, sampler.weights_id):
                return None
            if self._database.put_new(connection, table, row_of(sampler)):
                return sampler
            found = connection.execute(
                sa.select(table).where(
                    table.c.session_id == sampler.session_id,
                    table.c.sampling_session_seq_id == sampler.sampling_session_seq_id,
                )
            )
            return SamplerRecord(**found.one()._mapping)

        return await self._database.write(write)

    async def get(self, sampler_id: str) -> SamplerRecord | None:
        table = schema.samplers
        return await self._database.one(
            SamplerRecord, sa.select(table).where(table.c.sampler_id == sampler_id)
        )

    async def of_session(self, session_id: str) -> Sequence[SamplerRecord]:
        table = schema.samplers
        query = sa.select(table).where(table.c.session_id == session_id)
        return await self._database.all(
            SamplerRecord, query.order_by(table.c.sampling_session_seq_id)
        )

    async def join(self, sampler_id: str) -> int:
        """A number for one more client of the sampler; the first client has 0."""
        table = schema.samplers

        def write(connection: sa.Connection) -> int:
            row = connection.execute(
                sa.update(table)
                .where(table.c.sampler_id == sampler_id)
                .values(num_clients=table.c.num_clients + 1)
                .returning(table.c.num_clients)
            )
            return int(row.scalar_one()) - 1

        return await self._database.write(write)

    async def release(self, sampler_id: str) -> bool:
        """Forget an unnamed sampler that only one client has; whether it was one."""
        table = schema.samplers
        return bool(
            await self._database.execute(
                sa.delete(table).where(
                    table.c.sampler_id == sampler_id,
                    table.c.num_clients == 1,
                    table.c.weights_id.is_not(None),
                    table.c.model_path.is_(None),
                )
            )
        )

    async def silent_sessions(self, seen_before: float, finished_before: float) -> Sequence[str]:
        """Sessions with samplers that gave no sign of life since a moment, or since another if
        they are finished."""
        sessions, samplers = schema.sessions, schema.samplers
        is_finished = sa.and_(
            sessions.c.state != "active", sessions.c.last_seen_at < finished_before
        )
        query = sa.select(sessions.c.session_id).where(
            sa.or_(sessions.c.last_seen_at < seen_before, is_finished),
            sa.exists().where(samplers.c.session_id == sessions.c.session_id),
        )
        return await self._database.column(query)

    async def forget(self, session_id: str) -> None:
        table = schema.samplers
        await self._database.execute(sa.delete(table).where(table.c.session_id == session_id))

    async def add_stats(self, stats: Sequence[SamplerStatsRecord]) -> None:
        """Add to what samplers have given so far."""
        table = schema.sampler_stats
        statement = self._database.insert(table)
        given = statement.excluded
        greater = {"longest_tokens", "last_at"}
        fixed = {"sampler_id", "owner", "model_id", "first_at"}
        changes: dict[str, sa.ColumnElement[Any]] = {
            c.name: c + given[c.name] for c in table.c if c.name not in greater | fixed
        }
        for name in greater:
            changes[name] = sa.case((given[name] > table.c[name], given[name]), else_=table.c[name])
        adding = statement.on_conflict_do_update(index_elements=["sampler_id"], set_=changes)
        await self._database.execute_many(adding, [row_of(one) for one in stats])

    async def stats_of_run(self, model_id: str, limit: int) -> Sequence[SamplerStatsRecord]:
        """What was sampled from a run's weights, by the samplers used last first."""
        table = schema.sampler_stats
        query = sa.select(table).where(table.c.model_id == model_id)
        return await self._database.all(
            SamplerStatsRecord, query.order_by(table.c.last_at.desc()).limit(limit)
        )
