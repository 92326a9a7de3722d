"""The store's readers serve owners in turn: one owner's slow reads are waited for by him alone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.server.edge.owners import working_for
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.store import Store

if TYPE_CHECKING:
    from tests.support.in_process_server import TestServer

MANY = 40
"""More reads than there are threads."""


async def test_slow_reads_of_an_owner_leave_readers_for_another_and_for_the_server(
    tmp_path: Path,
) -> None:
    store = Store(sqlite_url(tmp_path / "store.db"), tmp_path / "blobs")
    release = threading.Event()
    order: list[str] = []

    def slow(number: int) -> None:
        release.wait(60)
        order.append(f"greedy {number}")

    with working_for("greedy"):
        greedy = [asyncio.create_task(store.database.in_thread(slow, n)) for n in range(MANY)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            with working_for("other"):
                assert await store.keys.list() == []
            assert await store.sessions.get("s") is None
        assert order == []
    finally:
        release.set()
        await asyncio.gather(*greedy)
        await store.close()
    assert sorted(order) == sorted(f"greedy {n}" for n in range(MANY)), "none is lost"


async def test_slow_listings_of_an_owner_are_not_waited_for_by_another(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = server.service.store, await server.other_user()
    release = threading.Event()
    page_of_owner = store.sessions.page_of_owner
    greedy_owner = (await store.keys.list())[0].owner

    async def slow(owner: str, *args: Any) -> Any:
        if owner == greedy_owner:
            await store.database.in_thread(release.wait, 60)
        return await page_of_owner(owner, *args)

    monkeypatch.setattr(store.sessions, "page_of_owner", slow)
    listings = [asyncio.create_task(server.api.get("/sessions")) for _ in range(MANY)]
    try:
        async with asyncio.timeout(30):
            await other.model()
            assert (await other.get("/sessions")).status_code == 200
        assert not any(task.done() for task in listings)
    finally:
        release.set()
    assert {(await task).status_code for task in listings} == {200}


async def test_who_leaves_during_a_slow_read_has_no_more_readers_than_who_stays(
    tmp_path: Path,
) -> None:
    """Otherwise a listing that is asked for and given up, again and again, takes them all."""
    store = Store(sqlite_url(tmp_path / "store.db"), tmp_path / "blobs")
    release = threading.Event()
    started = threading.Semaphore(0)

    def slow() -> None:
        started.release()
        release.wait(60)

    try:
        for _ in range(MANY):
            with working_for("greedy"):
                leaving = asyncio.create_task(store.database.in_thread(slow))
            await asyncio.sleep(0.005)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        async with asyncio.timeout(30):
            with working_for("other"):
                assert await store.keys.list() == []
        begun = 0
        while started.acquire(blocking=False):
            begun += 1
        assert begun <= 4, "half of them"
    finally:
        release.set()
        await store.close()
