"""Writes of many that go together, and queries that leave the log alone."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import StoreConflictError
from tinsmith.server.store.store import Store
from tinsmith.server.store.weights import unreferenced_query

if TYPE_CHECKING:
    pass


@contextlib.asynccontextmanager
async def _store(folder: Path) -> Any:
    store = Store(sqlite_url(folder / "tinsmith.db"), folder / "blobs")
    try:
        yield store
    finally:
        await store.close()


async def test_a_write_that_contradicts_fails_alone_among_many(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:

        def put(name: str) -> Callable[[sa.Connection], None]:
            return lambda connection: connection.execute(
                sa.insert(schema.secrets).values(name=name, value=b"x")
            )

        names = [f"name {i}" for i in range(50)]
        together = [store.database.write(put(name)) for name in [*names, names[7], *names[:2]]]
        ends = await asyncio.gather(*together, return_exceptions=True)
        failed = [isinstance(end, StoreConflictError) for end in ends]
        assert failed == [False] * 50 + [True] * 3
        query = sa.select(schema.secrets.c.name)
        assert set(names) <= set(await store.database.column(query))


async def test_unused_weights_are_found_without_reading_the_log(tmp_path: Path) -> None:
    async with _store(tmp_path):
        pass
    query = str(unreferenced_query().compile(dialect=sqlite.dialect()))
    with contextlib.closing(sqlite3.connect(tmp_path / "tinsmith.db")) as database:
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}")]
    scanned = [step for step in plan if step.startswith("SCAN")]
    assert len(scanned) == 1 and "weights" in scanned[0], plan
