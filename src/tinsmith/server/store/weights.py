"""Folders of weights, and what refers to them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database
from tinsmith.server.store.errors import OverQuotaError
from tinsmith.server.store.records import WeightsRecord


class Weights:
    def __init__(self, database: Database, max_owner_bytes: int | None) -> None:
        """`max_owner_bytes` bounds what one owner's checkpoints and unnamed samplers take."""
        self._database = database
        self._max_owner_bytes = max_owner_bytes

    async def get(self, weights_id: str) -> WeightsRecord | None:
        table = schema.weights
        return await self._database.one(
            WeightsRecord, sa.select(table).where(table.c.weights_id == weights_id)
        )

    async def ids(self) -> Sequence[str]:
        return await self._database.column(sa.select(schema.weights.c.weights_id))

    async def all(self) -> Sequence[WeightsRecord]:
        return await self._database.all(WeightsRecord, sa.select(schema.weights))

    async def mark_lost(self, weights_id: str, reason: str | None) -> None:
        """These weights cannot be had any more, or with None: they can again."""
        table = schema.weights
        await self._database.execute(
            sa.update(table).where(table.c.weights_id == weights_id).values(lost=reason)
        )

    async def check_quota(self, owner: str, num_bytes: int = 1) -> None:
        """Refuse so many bytes more of an owner's where there is no room for them now; what is
        recorded is checked again."""

        def read() -> None:
            with self._database.connect() as connection:
                self.check_room(connection, owner, num_bytes)

        if self._max_owner_bytes is not None:
            await self._database.in_thread(read)

    def check_room(self, connection: sa.Connection, owner: str, num_bytes: int) -> None:
        """The same within a write, where nothing comes in between."""
        limit = self._max_owner_bytes
        if limit is None:
            return
        stored = _bytes_of_owner(connection, owner)
        if stored + num_bytes > limit:
            raise OverQuotaError(
                f"{stored} bytes of checkpoints and unnamed samplers are stored for this owner and "
                f"{num_bytes} more are needed; at most {limit} may be: delete checkpoints, or "
                "finish sessions that are no longer needed"
            )

    async def room(self) -> list[tuple[str, str, int, int]]:
        """What takes room and why: the reason, the owner ("" for the server's own), how many
        folders and how many bytes."""

        def read() -> list[tuple[str, str, int, int]]:
            with self._database.connect() as connection:
                rows = connection.execute(sa.text(_ROOM))
                return [(what, owner, int(n), int(size)) for what, owner, n, size in rows]

        return await self._database.in_thread(read)

    async def unreferenced(self) -> Sequence[WeightsRecord]:
        """Weights that no checkpoint, sampler, snapshot or replayable load refers to."""
        return await self._database.all(WeightsRecord, unreferenced_query())

    async def forget(self, weights_ids: Sequence[str]) -> Sequence[str]:
        """Forget those of them that are still not referred to; which they are."""
        table = schema.weights

        def write(connection: sa.Connection) -> list[str]:
            # Somebody may have begun to use one since it was found.
            still = unreferenced_query().where(table.c.weights_id.in_(list(weights_ids)))
            gone = [row.weights_id for row in connection.execute(still)]
            connection.execute(sa.delete(table).where(table.c.weights_id.in_(gone)))
            return gone

        return await self._database.write(write)

    async def hold(self, request_id: str, weights_id: str) -> bool:
        """Keep weights for an operation that is about to use them; whether they are there."""
        operations = schema.operations

        def write(connection: sa.Connection) -> bool:
            if not are_there(connection, weights_id):
                return False
            connection.execute(
                sa.update(operations)
                .where(operations.c.request_id == request_id)
                .values(weights_id=weights_id)
            )
            return True

        return await self._database.write(write)


def are_there(connection: sa.Connection, weights_id: str) -> bool:
    """Whether weights are there within a write that is about to refer to them: what referred to
    them when they were found may have been deleted since."""
    table = schema.weights
    found = sa.select(table.c.weights_id).where(table.c.weights_id == weights_id)
    return connection.execute(found).first() is not None


def _bytes_of_owner(connection: sa.Connection, owner: str) -> int:
    """What an owner's checkpoints and unnamed samplers take; a copy counts like its source."""
    checkpoints, samplers, weights = schema.checkpoints, schema.samplers, schema.weights
    named = sa.select(sa.func.coalesce(sa.func.sum(checkpoints.c.size_bytes), 0))
    unnamed = sa.select(sa.func.coalesce(sa.func.sum(weights.c.size_bytes), 0)).join(
        samplers, samplers.c.weights_id == weights.c.weights_id
    )
    first = connection.execute(named.where(checkpoints.c.owner == owner))
    # A sampler of a checkpoint has a path, and takes no room of its own.
    is_unnamed = sa.and_(samplers.c.owner == owner, samplers.c.model_path.is_(None))
    second = connection.execute(unnamed.where(is_unnamed))
    return int(first.scalar_one()) + int(second.scalar_one())


# What takes room, in the order in which weights are counted: each once, for its first reason.
_ROOM = """
SELECT what, owner, count(*), sum(size_bytes) FROM (
  SELECT w.size_bytes,
    CASE WHEN c.owner IS NOT NULL THEN 'checkpoints'
         WHEN s.owner IS NOT NULL THEN 'unnamed samplers'
         WHEN w.kind = 'exact' THEN 'snapshots of models'
         ELSE 'weights that a replay may need' END AS what,
    COALESCE(c.owner, s.owner, '') AS owner
  FROM weights w
  LEFT JOIN (SELECT weights_id, min(owner) AS owner FROM checkpoints GROUP BY weights_id) c
    ON c.weights_id = w.weights_id
  LEFT JOIN (SELECT weights_id, min(owner) AS owner FROM samplers GROUP BY weights_id) s
    ON s.weights_id = w.weights_id
) AS each GROUP BY what, owner ORDER BY what, owner
"""


@functools.cache
def unreferenced_query() -> sa.Select[Any]:
    query = sa.select(schema.weights)
    for column in (
        schema.checkpoints.c.weights_id,
        schema.samplers.c.weights_id,
        schema.models.c.snapshot_weights_id,
        schema.models.c.previous_snapshot_weights_id,
        schema.operations.c.weights_id,
    ):
        query = query.where(~sa.exists().where(column == schema.weights.c.weights_id))
    return query
