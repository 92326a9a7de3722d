"""Curves: the steps of a run as a picture needs them, by way of the blocks that are kept.

Blocks are made after the fact, a few hundred steps in one write, and only of steps before the first
operation that is still pending: what is in a block does not change any more. Metrics that a client
posts for an earlier step are the exception, and draw their blocks anew.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database
from tinsmith.server.store.observing.blocks import (
    FANOUT,
    FIRST_SIZE,
    SIZES,
    Summary,
    first_blocks,
    in_blocks,
    of_step,
    size_for,
    thinned,
)
from tinsmith.server.store.records import StepSource

_STEPS_AT_ONCE = 512
"""In one write, which others wait for."""

_STEPS, _BLOCKS, _MARKS = schema.steps, schema.step_blocks, schema.step_marks
_MARK = sa.select(_MARKS.c.up_to).where(
    _MARKS.c.model_id == sa.bindparam("of_model"), _MARKS.c.source == sa.bindparam("of_source")
)


class Curves:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(
        self, model_id: str, source: StepSource, after: int, points: int
    ) -> list[Summary]:
        """The steps with numbers above `after` in at most `points` summaries, in order."""

        def read() -> list[Summary]:
            with self._database.connect() as connection:
                return thinned(_pieces(connection, model_id, source, after + 1, points), points)

        return await self._database.in_thread(read)

    async def draw(self, model_id: str, source: StepSource) -> None:
        """Make the blocks that have become complete."""
        while await self._database.write(
            lambda connection: _draw_some(connection, self._database, model_id, source)
        ):
            pass


def _pieces(
    connection: sa.Connection, model_id: str, source: StepSource, first: int, points: int
) -> list[Summary]:
    """The blocks and steps from `first` on: the largest blocks that are fine enough, then smaller
    ones where the large are not complete yet, and the newest steps as they are."""
    is_in = sa.and_(
        _STEPS.c.model_id == model_id, _STEPS.c.source == source, _STEPS.c.seq_id >= first
    )
    # Each by itself: only so does SQLite look at one end of the index alone.
    least = connection.execute(sa.select(sa.func.min(_STEPS.c.seq_id)).where(is_in)).scalar()
    if least is None:
        return []
    most = connection.execute(sa.select(sa.func.max(_STEPS.c.seq_id)).where(is_in)).scalar_one()
    up_to = connection.execute(_MARK, {"of_model": model_id, "of_source": source}).scalar() or 0
    size = size_for(most - least + 1, points)
    position = least
    found: list[Summary] = []
    if size > 1:
        start = min(-(-least // size) * size, up_to)
        found += _steps(connection, model_id, source, position, start)
        position = max(position, start)
    for each in reversed(SIZES):
        end = up_to // each * each
        if each <= size and end > position:
            found += _blocks(connection, model_id, source, each, position // each, end // each)
            position = end
    return found + _steps(connection, model_id, source, position, most + 1)


def _steps(
    connection: sa.Connection, model_id: str, source: StepSource, start: int, end: int
) -> list[Summary]:
    if start >= end:
        return []
    query = sa.select(_STEPS.c.seq_id, _STEPS.c.at, _STEPS.c.metrics).where(
        _STEPS.c.model_id == model_id,
        _STEPS.c.source == source,
        _STEPS.c.seq_id >= start,
        _STEPS.c.seq_id < end,
        _STEPS.c.metrics != "{}",
    )
    rows = connection.execute(query.order_by(_STEPS.c.seq_id))
    return [of_step(*row) for row in rows]


def _blocks(
    connection: sa.Connection, model_id: str, source: StepSource, size: int, start: int, end: int
) -> list[Summary]:
    query = sa.select(_BLOCKS.c.summary).where(
        _BLOCKS.c.model_id == model_id,
        _BLOCKS.c.source == source,
        _BLOCKS.c.size == size,
        _BLOCKS.c.block >= start,
        _BLOCKS.c.block < end,
    )
    rows = connection.execute(query.order_by(_BLOCKS.c.block)).scalars()
    return [Summary.from_json(text) for text in rows]


def _draw_some(
    connection: sa.Connection, database: Database, model_id: str, source: StepSource
) -> bool:
    """Make blocks of the next few hundred steps; whether there may be more."""
    of_run = {"model_id": model_id, "source": source}
    up_to = connection.execute(_MARK, {"of_model": model_id, "of_source": source}).scalar() or 0
    query = (
        sa.select(_STEPS.c.seq_id, _STEPS.c.at, _STEPS.c.metrics)
        .where(
            _STEPS.c.model_id == model_id,
            _STEPS.c.source == source,
            _STEPS.c.seq_id >= up_to,
        )
        .order_by(_STEPS.c.seq_id)
        .limit(_STEPS_AT_ONCE)
    )
    if source == "operation" and (pending := _first_pending(connection, model_id)) is not None:
        query = query.where(_STEPS.c.seq_id < pending)
    rows = connection.execute(query).all()
    end = (rows[-1][0] + 1) // FIRST_SIZE * FIRST_SIZE if rows else 0
    if end <= up_to:
        return False
    _put(connection, database, model_id, source, FIRST_SIZE, first_blocks(rows, end))
    for size in SIZES[1:]:
        first, last = up_to // size, end // size
        if last <= first:
            break
        inside = _blocks(
            connection, model_id, source, size // FANOUT, first * FANOUT, last * FANOUT
        )
        _put(connection, database, model_id, source, size, in_blocks(inside, size))
    _upsert(connection, database, _MARKS, [{**of_run, "up_to": end}])
    return len(rows) == _STEPS_AT_ONCE


def _put(
    connection: sa.Connection,
    database: Database,
    model_id: str,
    source: StepSource,
    size: int,
    blocks: list[tuple[int, Summary]],
) -> None:
    rows: list[dict[str, Any]] = [
        {
            "model_id": model_id,
            "source": source,
            "size": size,
            "block": block,
            "summary": summary.to_json(),
        }
        for block, summary in blocks
    ]
    if rows:
        _upsert(connection, database, _BLOCKS, rows)


def _upsert(
    connection: sa.Connection, database: Database, table: sa.Table, rows: list[dict[str, Any]]
) -> None:
    """Enter rows in the place of those with the same keys."""
    adding = database.insert(table)
    changed = {c.name: adding.excluded[c.name] for c in table.c if not c.primary_key}
    key = list(table.primary_key.columns)
    connection.execute(adding.on_conflict_do_update(index_elements=key, set_=changed), rows)


def redraw(connection: sa.Connection, database: Database, model_id: str, number: int) -> None:
    """A step that a client posted has changed: make anew the blocks that hold it, if there are."""
    mark = {"of_model": model_id, "of_source": "posted"}
    up_to = connection.execute(_MARK, mark).scalar() or 0
    for size in SIZES:
        block = number // size
        if (block + 1) * size > up_to:
            break
        if size == FIRST_SIZE:
            inside = _steps(connection, model_id, "posted", block * size, (block + 1) * size)
        else:
            first = block * FANOUT
            inside = _blocks(connection, model_id, "posted", size // FANOUT, first, first + FANOUT)
        _put(connection, database, model_id, "posted", size, in_blocks(inside, size))


def _first_pending(connection: sa.Connection, model_id: str) -> int | None:
    table = schema.operations
    query = sa.select(sa.func.min(table.c.seq_id)).where(
        table.c.status == "pending", table.c.model_id == model_id
    )
    found: int | None = connection.execute(query).scalar()
    return found
