"""A server in a simulated event loop: the real application and store, without threads or sockets.

It can be killed at any moment, as `kill -9` does it: what was not committed is lost, what was
committed may not have been answered, and the next server finds the same data folder.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import sqlalchemy as sa

from tests.support.simulated_loop import running_loop
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.app import build_app
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.metrics import Metrics
from tinsmith.server.service import Service
from tinsmith.server.storage import binding
from tinsmith.server.storage.folder import FolderStorage
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.store import Store
from tinsmith.server.store.writer import CommitCount, OnCommit, Write, commit, no_fence, settle

T = TypeVar("T")

_HEAD_START_SECONDS = 120
"""However slow the machine, a file was written before the time that the simulation shows."""


@contextmanager
def simulated_machine(
    seed: int,
    clock_error: Callable[[], float] = lambda: 0.0,
    fsync: Callable[[int], None] = lambda descriptor: None,
) -> Iterator[None]:
    """All clocks of the process follow the running loop's, and a seed draws the ids: the server
    then decides the same in every run. Files keep real times, so the clocks begin at the present.
    Nothing waits for a disk. `clock_error` is by how much the time of day is wrong.
    """
    began, chance = int(time.time()) + _HEAD_START_SECONDS, random.Random(seed)
    real_time, real_monotonic, real_counter = time.time, time.monotonic, time.perf_counter

    # Threads that an earlier test has left keep their time. A server looks at the clock dozens of
    # times for each operation.
    def time_of_day() -> float:
        try:
            return began + running_loop()._now + clock_error()
        except AttributeError:
            return real_time()

    def monotonic() -> float:
        try:
            return running_loop()._now
        except AttributeError:
            return real_monotonic()

    def perf_counter() -> float:
        try:
            return running_loop()._now
        except AttributeError:
            return real_counter()

    with (
        patch("time.time", time_of_day),
        patch("time.monotonic", monotonic),
        patch("time.perf_counter", perf_counter),
        patch("uuid.uuid4", lambda: uuid.UUID(int=chance.getrandbits(128), version=4)),
        patch("os.fsync", fsync),
    ):
        gc.collect()
        gc.disable()  # it would close generators, and so wake tasks, at moments of its own
        try:
            yield
        finally:
            gc.enable()


COMMIT_SECONDS = (0.0, 0.01, 0.3)
"""What a commit takes: any of these."""


class LoopWriter:
    """Carries out writes on the event loop, in order, at moments of the seed's choosing."""

    def __init__(
        self,
        random: random.Random,
        engine: sa.Engine,
        on_commit: OnCommit,
        fence: Write = no_fence,
        commit_seconds: Sequence[float] = COMMIT_SECONDS,
    ) -> None:
        self._random = random
        self._commit_seconds = commit_seconds
        self._on_commit = on_commit
        self._fence = fence
        self._count = CommitCount()
        self._connection = engine.connect()
        self._connection.connection.cursor().execute("PRAGMA synchronous=OFF")  # as `os.fsync`
        self._queued: list[tuple[Write, asyncio.Future[Any]]] = []
        self._is_cut = False

    def claim(self, claim: Write) -> None:
        claim(self._connection)

    def count_commits(self, tell: Callable[[int], None]) -> None:
        self._count.tell = tell

    async def run(self, write: Callable[[sa.Connection], T]) -> T:
        if self._is_cut:
            raise asyncio.CancelledError
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not self._queued:
            seconds = self._random.choice(self._commit_seconds)
            asyncio.get_running_loop().call_later(seconds, self._commit)
        self._queued.append((write, waiter))
        return await waiter

    def cut(self) -> None:
        """The process is gone. What was queued is on disk or not; nobody hears which."""
        if self._random.random() < 0.5:
            self._commit()
        self._queued = []
        self._is_cut = True
        self._connection.close()

    def close(self) -> None:
        if not self._is_cut:
            self._commit()
            self._is_cut = True
            self._connection.close()

    def _commit(self) -> None:
        batch, self._queued = self._queued, []
        if batch:
            writes = [write for write, _ in batch]
            ends = commit(self._connection, writes, self._prepare, self._committed)
            for (_, waiter), end in zip(batch, ends, strict=True):
                settle(waiter, end)

    def _prepare(self, connection: sa.Connection) -> None:
        self._fence(connection)
        self._count.add(connection)

    def _committed(self, seconds: float, num_writes: int) -> None:
        self._count.committed()
        self._on_commit(seconds, num_writes)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


class SimulatedServer:
    commit_seconds: Sequence[float] = COMMIT_SECONDS

    def __init__(self, random: random.Random, config: ServerConfig, model: FakeModel) -> None:
        self._random = random
        self._config = config
        self._model = model
        self.engines: dict[int, FakeEngine] = {}
        """The present engine of each slot."""

    async def start(self, prepare: Callable[[Store], Awaitable[None]] | None = None) -> None:
        """`prepare` is called with the store before anybody is served."""
        folder = DataFolder(self._config.data_dir)
        folder.create()
        self.writers: list[LoopWriter] = []
        self.store = Store(sqlite_url(folder.database), folder.blobs, open_writer=self._writer)
        storage = FolderStorage(folder)
        await binding.check(storage, self.store)
        await binding.bind(storage, self.store)
        if prepare is not None:
            await prepare(self.store)
        secret = await self.store.keys.secret("signing")
        self.service = Service(self._config, self.store, secret, self.new_engine, Metrics())
        self.service.url = "http://server"
        self._app = build_app(self.service)
        await self.service.start()

    async def stop(self) -> None:
        await self.service.stop()

    async def kill(self, survivors: set[asyncio.Task[Any]]) -> None:
        """End everything but the tasks of those who are not part of the server."""
        for engine in self.engines.values():
            engine.die("the server was killed")
        for writer in self.writers:
            writer.cut()
        while parts := asyncio.all_tasks() - survivors - {asyncio.current_task()}:
            for part in sorted(parts, key=_age):
                part.cancel()
            await asyncio.wait(parts, timeout=1.0)
        await self.store.close()

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """One request, without a connection in between."""
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            for part in parts:
                return part
            return await asyncio.get_running_loop().create_future()  # the client stays

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": f"/api/v1{path}",
            "raw_path": f"/api/v1{path}".encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": ("server", 80),
            "client": ("client", 1),
        }
        await self._app(scope, receive, send)
        given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return Answer(sent[0]["status"], given.get("content-type", ""), content)

    async def new_engine(self, plan: SlotPlan) -> FakeEngine:
        await asyncio.sleep(self._random.random() * 2)
        seconds = self._config.fake_pass_seconds
        config = FakeEngineConfig(models=(self._model,), pass_seconds=seconds)
        engine = self.engines[plan.number] = FakeEngine(config)
        return engine

    def _writer(self, engine: sa.Engine, on_commit: OnCommit, fence: Write) -> LoopWriter:
        self.writers.append(LoopWriter(self._random, engine, on_commit, fence, self.commit_seconds))
        return self.writers[-1]


def _age(task: asyncio.Task[Any]) -> tuple[bool, int, str]:
    """In the order in which tasks were made, after those with names; a set has none."""
    name = task.get_name()
    return name.startswith("Task-"), len(name), name
