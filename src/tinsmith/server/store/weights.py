"""Folders of weights, and what refers to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database
from tinsmith.server.store.records import WeightsRecord


class Weights:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, weights_id: str) -> WeightsRecord | None:
        table = schema.weights
        return await self._database.one(
            WeightsRecord, sa.select(table).where(table.c.weights_id == weights_id)
        )

    async def ids(self) -> Sequence[str]:
        return await self._database.column(sa.select(schema.weights.c.weights_id))

    async def unreferenced(self) -> Sequence[str]:
        """Weights that no checkpoint, sampler, snapshot or replayable load refers to."""
        return await self._database.column(unreferenced_query())

    async def forget(self, weights_ids: Sequence[str]) -> Sequence[str]:
        """Forget those of them that are still not referred to; which they were."""
        column = schema.weights.c.weights_id

        def write(connection: sa.Connection) -> list[str]:
            # Somebody may have begun to use one since it was found.
            still = unreferenced_query().where(column.in_(list(weights_ids)))
            stray = list(connection.execute(still).scalars())
            connection.execute(sa.delete(schema.weights).where(column.in_(stray)))
            return stray

        return await self._database.write(write)

    async def hold(self, request_id: str, weights_id: str) -> bool:
        """Keep weights for an operation that is about to use them; whether they are there."""
        operations, weights = schema.operations, schema.weights

        def write(connection: sa.Connection) -> bool:
            found = sa.select(weights.c.weights_id).where(weights.c.weights_id == weights_id)
            if connection.execute(found).first() is None:
                return False
            connection.execute(
                sa.update(operations)
                .where(operations.c.request_id == request_id)
                .values(weights_id=weights_id)
            )
            return True

        return await self._database.write(write)


def unreferenced_query() -> sa.Select[Any]:
    query = sa.select(schema.weights.c.weights_id)
    for column in (
        schema.checkpoints.c.weights_id,
        schema.samplers.c.weights_id,
        schema.models.c.snapshot_weights_id,
        schema.models.c.previous_snapshot_weights_id,
        schema.operations.c.weights_id,
    ):
        query = query.where(~sa.exists().where(column == schema.weights.c.weights_id))
    return query
