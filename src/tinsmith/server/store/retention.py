"""What the log forgets: results that were fetched or are old, operations that nothing needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.blobs import Blobs
from tinsmith.server.store.database import Database
from tinsmith.server.store.observing.all_steps import move_steps

_DROPPED_AT_ONCE = 500

TRIMMED_AT_ONCE = 2000
"""Operations of one model that one transaction deletes: others' writes wait for it."""


class Retention:
    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs

    async def drop_results(
        self, *, retrieved_before: float, finished_before: float, max_bytes: int
    ) -> int:
        """Forget results that were fetched, or ended, before a moment; how many there were. Beyond
        `max_bytes` the owners whose results take most lose their oldest ones."""
        table = schema.operations
        is_old = sa.or_(
            table.c.finished_at < finished_before,
            sa.func.coalesce(table.c.retrieved_at, math.inf) < retrieved_before,
        )
        kept = sa.and_(table.c.result_bytes > 0, ~is_old)
        num_bytes = sa.func.sum(table.c.result_bytes)
        newest_first = num_bytes.over(
            partition_by=table.c.owner,
            order_by=[table.c.finished_at.desc(), table.c.request_id],
        )
        sized = sa.select(
            table.c.request_id, table.c.result_file, newest_first.label("together")
        ).where(kept)
        by_owner = sa.select(num_bytes).where(kept).group_by(table.c.owner)

        def read() -> list[tuple[str, str | None]]:
            # Outside of the writing thread: whole tables are looked at, and others want to write.
            with self._database.connect() as connection:
                old = sa.select(table.c.request_id, table.c.result_file)
                drop = [*connection.execute(old.where(table.c.result_bytes > 0, is_old))]
                held = [int(each) for each in connection.execute(by_owner).scalars()]
                if sum(held) > max_bytes:
                    beyond = sized.subquery()
                    excess = sa.select(beyond.c.request_id, beyond.c.result_file)
                    most = _most_for_each(held, max_bytes)
                    drop += connection.execute(excess.where(beyond.c.together > most))
            return [(row.request_id, row.result_file) for row in drop]

        drop = await self._database.in_thread(read)
        for start in range(0, len(drop), _DROPPED_AT_ONCE):
            part = drop[start : start + _DROPPED_AT_ONCE]
            ids = [request_id for request_id, _ in part]
            await self._database.execute(
                sa.update(table)
                .where(table.c.request_id.in_(ids))
                .values(result=None, result_file=None, result_bytes=0, result_type="dropped")
            )
            await self._blobs.delete([name for _, name in part if name])
        return len(drop)

    async def trim(self, *, keep: int, ended_before: float) -> int:
        """Delete operations that ended before a moment, whose results are gone and which no
        rebuild needs; how many there were. The last `keep` before the older snapshot stay, so
        that a late retry finds them, and so does each model's first, which created it."""
        num_trimmed = 0
        for model_id, after, last in await self._trimmable(keep):
            mark = await self._removable_up_to(model_id, after, last, ended_before)
            for done in range(max(after, 0), mark, TRIMMED_AT_ONCE):
                part = done + 1, min(done + TRIMMED_AT_ONCE, mark)
                num_trimmed += await self._trim_model(model_id, *part)
        return num_trimmed

    async def _trimmable(self, keep: int) -> list[tuple[str, int, int]]:
        """Models with more operations than are kept: up to which number they were trimmed, and
        up to which they may be."""
        table = schema.models
        last = table.c.previous_snapshot_seq_id - keep
        query = sa.select(table.c.model_id, table.c.trimmed_seq_id, last.label("last"))

        def read() -> list[tuple[str, int, int]]:
            with self._database.connect() as connection:
                rows = connection.execute(query.where(last > table.c.trimmed_seq_id))
                return [(row.model_id, row.trimmed_seq_id, row.last) for row in rows]

        return await self._database.in_thread(read)

    async def _removable_up_to(
        self, model_id: str, after: int, last: int, ended_before: float
    ) -> int:
        table = schema.operations
        is_removable = sa.and_(
            table.c.status != "pending",
            table.c.result_bytes == 0,
            table.c.payload.is_(None),
            table.c.payload_file.is_(None),
            table.c.weights_id.is_(None),
            # The error of a failed one is its result.
            sa.or_(table.c.status == "done", table.c.finished_at < ended_before),
        )
        blocked = sa.select(table.c.seq_id).where(
            table.c.model_id == model_id,
            table.c.seq_id > max(after, 0),
            table.c.seq_id <= last,
            ~is_removable,
        )

        def read() -> int:
            with self._database.connect() as connection:
                first = connection.execute(blocked.order_by(table.c.seq_id).limit(1)).scalar()
            return last if first is None else int(first) - 1

        return await self._database.in_thread(read)

    async def _trim_model(self, model_id: str, first: int, last: int) -> int:
        operations, models = schema.operations, schema.models

        def write(connection: sa.Connection) -> int:
            connection.execute(
                sa.update(models).where(models.c.model_id == model_id).values(trimmed_seq_id=last)
            )
            move_steps(connection, model_id, first, last)
            return connection.execute(
                sa.delete(operations).where(
                    operations.c.model_id == model_id, operations.c.seq_id.between(first, last)
                )
            ).rowcount

        return await self._database.write(write)


def _most_for_each(held: Sequence[int], most: int) -> int:
    """What each owner may keep of more than `most` bytes: who has no more than an even part of what
    the others leave keeps all of it."""
    left = most
    for index, num_bytes in enumerate(sorted(held)):
        part = left // (len(held) - index)
        if num_bytes > part:
            return part
        left -= num_bytes
    return most
