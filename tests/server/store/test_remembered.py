"""What is remembered of the store: nothing that has changed, nothing of another's, so many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.in_process_server import MODEL
from tinsmith.server.sampling.samplers import Samplers
from tinsmith.server.sessions import Sessions
from tinsmith.server.store.store import Remembered

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, TestServer


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_older_is_found_than_what_was_written_before(seed: int) -> None:
    """Reads and writes of a few records at a time, in any order, each as slow as it likes."""
    draw = random.Random(seed)
    stored = dict.fromkeys("abcd", 0)

    async def pause() -> None:
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)

    async def read(name: str) -> int | None:
        await pause()
        version = stored.get(name)
        await pause()
        return version

    remembered = Remembered(read, most=3)
    written = dict(stored)
    """As of the last write that is over."""

    async def write(name: str) -> None:
        version = stored[name] = stored[name] + 1
        await pause()
        remembered.forget(name)
        written[name] = max(written[name], version)

    async def look(name: str) -> None:
        least = written[name]
        found = await remembered.get(name, lambda version: True)
        assert found is not None and found >= least
        assert len(remembered) <= 3

    async def live() -> None:
        for _ in range(30):
            await pause()
            await (write if draw.random() < 0.3 else look)(draw.choice("abcd"))

    await asyncio.gather(*(live() for _ in range(5)))
    for name, version in stored.items():
        assert await remembered.get(name, lambda _: True) == version


class Slow:
    """A read of the store that has its answer, and gives it when it is let go."""

    def __init__(self, read: Callable[[str], Awaitable[Any]]) -> None:
        self._read = read
        self.has_read, self.let_go = asyncio.Event(), asyncio.Event()

    async def __call__(self, name: str) -> Any:
        found = await self._read(name)
        self.has_read.set()
        await self.let_go.wait()
        return found


async def test_a_session_that_ends_while_it_is_read_is_over(
    server: TestServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session_id = server.service.store, await api.session()
    session = await store.sessions.get(session_id)
    assert session is not None
    slow = Slow(store.sessions.get)
    monkeypatch.setattr(store.sessions, "get", slow)
    sessions = Sessions(store, server.service.models, server.service.config)
    looking = asyncio.create_task(sessions.get(session_id, session.owner))
    await slow.has_read.wait()
    await sessions.finish(session, "done", None)
    slow.let_go.set()
    await looking
    found = await sessions.get(session_id, session.owner)
    assert found is not None and found.state == "finished"


async def test_samplers_that_are_deleted_while_one_is_read_are_gone(
    server: TestServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session_id = server.service.store, await api.session()
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler_id = (await api.ok("/create_sampling_session", body))["sampling_session_id"]
    record = await store.samplers.get(sampler_id)
    assert record is not None
    slow = Slow(store.samplers.get)
    monkeypatch.setattr(store.samplers, "get", slow)
    samplers = Samplers(store)
    looking = asyncio.create_task(samplers.get(sampler_id, record.owner))
    await slow.has_read.wait()
    await samplers.forget(session_id)
    slow.let_go.set()
    await looking
    assert await samplers.get(sampler_id, record.owner) is None


async def test_old_sessions_that_are_looked_at_do_not_stay_in_memory() -> None:
    async def read(name: str) -> str | None:
        return name

    remembered = Remembered(read, most=10)
    for number in range(1000):
        assert await remembered.get(str(number), lambda _: True) == str(number)
        assert await remembered.get(str(number), lambda _: False) is None
    assert len(remembered) == 10


async def test_large_records_leave_room_for_fewer_others() -> None:
    async def read(name: str) -> str | None:
        return name

    remembered = Remembered(read, most=10, size=len)
    for name in ("aaaa", "bbb", "ccc", "dddd"):
        await remembered.get(name, lambda _: True)
    assert len(remembered) == 3, "the first has gone: fourteen are more than ten"
    remembered.forget("bbb")
    await remembered.get("eee", lambda _: True)
    assert len(remembered) == 3, "what was forgotten takes no room"
    await remembered.get("f" * 11, lambda _: True)
    assert len(remembered) == 0
