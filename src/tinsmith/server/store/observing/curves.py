"""Curves: the steps of a run as a picture needs them, by way of the blocks that are kept.

Blocks are made after the fact, a few hundred steps in one write, and only of steps before the first
operation that is still pending: what is in a block does not change any more. Metrics that a client
posts for an earlier step are the exception, and draw their blocks anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database
from tinsmith.server.store.observing.all_steps import ALL_STEPS, compared
from tinsmith.server.store.observing.blocks import (
    FANOUT,
    FIRST_SIZE,
    SIZES,
    STEPS_PER_PART,
    Summary,
    drawn_together,
    in_blocks,
    of_step,
    size_for,
    thinned,
)
from tinsmith.server.store.records import StepSource

_STEPS_AT_ONCE = 1024
"""In one write, which others wait for."""

_NO_END = 2**63 - 1
"""Above the number of any step."""

_STEPS, _BLOCKS, _MARKS = ALL_STEPS, schema.step_blocks, schema.step_marks
# Made once: to build a statement costs more than to read a hundred steps.
_MARK = sa.select(_MARKS.c.up_to).where(
    _MARKS.c.model_id == sa.bindparam("of_model"), _MARKS.c.source == sa.bindparam("of_source")
)
_NUMBERS = (
    sa.select(_STEPS.c.seq_id)
    .where(
        _STEPS.c.model_id == sa.bindparam("of_model"),
        _STEPS.c.source == sa.bindparam("of_source"),
        _STEPS.c.seq_id >= sa.bindparam("start"),
    )
    .limit(1)
)
# In this form, and not as a minimum, SQLite looks at one end of each index alone.
_FIRST, _LAST = _NUMBERS.order_by(_STEPS.c.seq_id), _NUMBERS.order_by(_STEPS.c.seq_id.desc())
_STEPS_BETWEEN = (
    sa.select(_STEPS.c.seq_id, _STEPS.c.at, _STEPS.c.metrics)
    .where(
        _STEPS.c.model_id == sa.bindparam("of_model"),
        _STEPS.c.source == sa.bindparam("of_source"),
        _STEPS.c.seq_id >= sa.bindparam("start"),
        _STEPS.c.seq_id < sa.bindparam("end"),
    )
    .order_by(_STEPS.c.seq_id)
)
_NEXT_STEPS = _STEPS_BETWEEN.limit(_STEPS_AT_ONCE)
_STEPS_WITH_METRICS = _STEPS_BETWEEN.where(_STEPS.c.metrics != "{}")
_BLOCKS_BETWEEN = (
    sa.select(_BLOCKS.c.summary)
    .where(
        _BLOCKS.c.model_id == sa.bindparam("of_model"),
        _BLOCKS.c.source == sa.bindparam("of_source"),
        _BLOCKS.c.size == sa.bindparam("of_size"),
        _BLOCKS.c.block >= sa.bindparam("start"),
        _BLOCKS.c.block < sa.bindparam("end"),
    )
    .order_by(_BLOCKS.c.block)
)
_FIRST_PENDING = sa.select(sa.func.min(schema.operations.c.seq_id)).where(
    schema.operations.c.status == "pending",
    # Fewer operations are pending than a run has.
    compared(schema.operations.c.model_id) == sa.bindparam("of_model"),
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

    async def draw(self, model_id: str, source: StepSource, least: int = 0) -> None:
        """Make the blocks that have become complete, where at least so many steps are in none."""

        def undrawn() -> int:
            with self._database.connect() as connection:
                up_to = connection.execute(_MARK, of_run).scalar() or 0
                last = connection.execute(_LAST, {**of_run, "start": up_to}).scalar()
                return 0 if last is None else last - up_to + 1

        of_run = {"of_model": model_id, "of_source": source}
        if least and await self._database.in_thread(undrawn) < least:
            return
        while await self._database.write(
            lambda connection: _draw_some(connection, self._database, model_id, source)
        ):
            pass


def _pieces(
    connection: sa.Connection, model_id: str, source: StepSource, first: int, points: int
) -> list[Summary]:
    """The blocks and steps from `first` on: the largest blocks that are fine enough, then smaller
    ones where the large are not complete yet, and the newest steps as they are."""
    of_run = {"of_model": model_id, "of_source": source}
    least = connection.execute(_FIRST, {**of_run, "start": first}).scalar()
    if least is None:
        return []
    most = connection.execute(_LAST, {**of_run, "start": first}).scalar_one()
    up_to = connection.execute(_MARK, of_run).scalar() or 0
    size = size_for(most - least + 1, points)
    position = least
    found: list[Summary] = []
    if size > 1:
        start = min(-(-least // size) * size, up_to)
        found += _steps(connection, model_id, source, position, start, size)
        position = max(position, start)
    for each in reversed(SIZES):
        end = up_to // each * each
        if each <= size and end > position:
            found += _blocks(connection, model_id, source, each, position // each, end // each)
            position = end
    return found + _steps(connection, model_id, source, position, most + 1, size)


def _steps(
    connection: sa.Connection,
    model_id: str,
    source: StepSource,
    start: int,
    end: int,
    size: int = 1,
) -> list[Summary]:
    """The steps themselves, or in parts of at most `size`."""
    if start >= end:
        return []
    asked = {"of_model": model_id, "of_source": source, "start": start, "end": end}
    rows = connection.execute(_STEPS_WITH_METRICS, asked)
    if size < STEPS_PER_PART:
        return [of_step(*row) for row in rows]
    return [part for _, part in drawn_together(rows, STEPS_PER_PART)]


def _blocks(
    connection: sa.Connection, model_id: str, source: StepSource, size: int, start: int, end: int
) -> list[Summary]:
    asked = {"of_model": model_id, "of_source": source, "start": start, "end": end}
    rows = connection.execute(_BLOCKS_BETWEEN, {**asked, "of_size": size}).scalars()
    return [Summary.from_json(text) for text in rows]


def _draw_some(
    connection: sa.Connection, database: Database, model_id: str, source: StepSource
) -> bool:
    """Make blocks of the next few hundred steps; whether there may be more."""
    of_run = {"of_model": model_id, "of_source": source}
    up_to = connection.execute(_MARK, of_run).scalar() or 0
    pending: int | None = None
    if source == "operation":
        pending = connection.execute(_FIRST_PENDING, {"of_model": model_id}).scalar()
    before = _NO_END if pending is None else pending
    rows = connection.execute(_NEXT_STEPS, {**of_run, "start": up_to, "end": before}).all()
    end = (rows[-1][0] + 1) // FIRST_SIZE * FIRST_SIZE if rows else 0
    if end <= up_to:
        return False
    whole = [row for row in rows if row[0] < end]
    _put(connection, database, model_id, source, FIRST_SIZE, drawn_together(whole, FIRST_SIZE))
    for size in SIZES[1:]:
        first, last = up_to // size, end // size
        if last <= first:
            break
        inside = _blocks(
            connection, model_id, source, size // FANOUT, first * FANOUT, last * FANOUT
        )
        _put(connection, database, model_id, source, size, in_blocks(inside, size))
    mark = {"model_id": model_id, "source": source, "up_to": end}
    _upsert(connection, database, _MARKS, [mark])
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
    connection.execute(_replacing(database.insert, table), rows)


@cache
def _replacing(insert: Callable[[sa.Table], Any], table: sa.Table) -> sa.Executable:
    adding = insert(table)
    changed = {c.name: adding.excluded[c.name] for c in table.c if not c.primary_key}
    key = list(table.primary_key.columns)
    replacing: sa.Executable = adding.on_conflict_do_update(index_elements=key, set_=changed)
    return replacing


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
