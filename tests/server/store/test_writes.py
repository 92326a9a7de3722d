"""Writes of many that go together, and queries that leave the log alone."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from tests.contract.store_rows import MODEL, operation
from tinsmith.server.store import schema
from tinsmith.server.store.blobs import INLINE_BYTES
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.errors import StoreConflictError
from tinsmith.server.store.pacing import APART_SECONDS, MANY
from tinsmith.server.store.store import Store
from tinsmith.server.store.weights import unreferenced_query
from tinsmith.server.store.writer import Writer


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


async def test_an_event_loop_is_woken_once_for_all_writes_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    async with _store(tmp_path) as store:
        woken, begun = [], threading.Event()

        def wake(*arguments: Any) -> Any:
            woken.append(arguments)
            return call(*arguments)

        call = loop.call_soon_threadsafe
        first = asyncio.create_task(store.database.write(lambda _: begun.wait()))
        await asyncio.sleep(0)
        others = [
            asyncio.create_task(store.database.write(lambda _, value=value: value))
            for value in range(20)
        ]
        await asyncio.sleep(0)
        monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
        begun.set()
        assert await first is True
        assert await asyncio.gather(*others) == list(range(20))
        assert len(woken) <= 2


async def test_commits_are_a_little_apart_while_many_write(tmp_path: Path) -> None:
    def now(_: sa.Connection) -> float:
        return time.monotonic()

    async with _store(tmp_path) as store:
        write = store.database.write
        while True:
            many = await asyncio.gather(*(write(now) for _ in range(2 * MANY)))
            first, second = [await write(now) for _ in range(2)]
            if second - min(many) < 0.1:  # on a busy machine they may be forgotten by now
                break
        assert second - first > 0.9 * APART_SECONDS


async def test_a_caller_who_goes_away_does_not_take_the_write_along(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:
        begun = threading.Event()
        first = asyncio.create_task(store.database.write(lambda _: begun.wait()))
        secret = sa.insert(schema.secrets).values(name="kept", value=b"x")
        gone = asyncio.create_task(store.database.execute(secret))
        await asyncio.sleep(0)
        gone.cancel()
        begun.set()
        await first
        await store.database.write(lambda _: None)
        assert "kept" in await store.database.column(sa.select(schema.secrets.c.name))


async def test_who_goes_away_while_a_large_request_is_recorded_leaves_it_whole(
    tmp_path: Path,
) -> None:
    """As when a server is stopped: the row may be written all the same, and names the file."""
    asked, begun = asyncio.Event(), threading.Event()

    class Noticing(Writer):
        async def run(self, write: Callable[[sa.Connection], Any]) -> Any:
            asked.set()
            return await super().run(write)

    store = Store(sqlite_url(tmp_path / "tinsmith.db"), tmp_path / "blobs", open_writer=Noticing)
    try:
        payload = bytes(INLINE_BYTES + 1)
        first = asyncio.create_task(store.database.write(lambda _: begun.wait()))
        await asked.wait()
        asked.clear()
        row = operation(0, kind="create_model", payload=payload)
        gone = asyncio.create_task(store.log.record(row, MODEL))
        await asked.wait()
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        begun.set()
        await first
        await store.database.write(lambda _: None)
        assert await store.log.read_payload(row.request_id) == payload
    finally:
        await store.close()


async def test_a_store_that_is_bound_to_no_folder_counts_no_commits(tmp_path: Path) -> None:
    async with _store(tmp_path) as store:
        told: list[int] = []
        store.database.count_commits(told.append)
        await store.database.write(lambda _: None)
        assert told == []


async def test_unused_weights_are_found_without_reading_the_log(tmp_path: Path) -> None:
    async with _store(tmp_path):
        pass
    query = str(unreferenced_query().compile(dialect=sqlite.dialect()))
    with contextlib.closing(sqlite3.connect(tmp_path / "tinsmith.db")) as database:
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {query}")]
    scanned = [step for step in plan if step.startswith("SCAN")]
    assert len(scanned) == 1 and "weights" in scanned[0], plan
