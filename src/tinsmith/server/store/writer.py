"""The writing thread: many small writes, one commit.

A commit that reaches the disk takes milliseconds however little it holds. So writes queue up
while one commit is under way, and the next carries all of them; each caller is answered after the
commit that contains its write. A write that fails takes back only itself (a savepoint).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

T = TypeVar("T")

_MAX_WRITES_PER_COMMIT = 512

Write = Callable[[Connection], Any]


class Writer:
    def __init__(self, engine: Engine, on_commit: Callable[[float, int], None]) -> None:
        """`on_commit` hears the seconds and the number of writes of every commit."""
        self._engine = engine
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[tuple[Write, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def run(self, write: Callable[[Connection], T]) -> T:
        """Carry out `write` in the writing thread; return when it is on disk."""
        future: Future[T] = Future()
        self._queue.put((write, future))
        # A caller who goes away must not take the write with it: others may wait for its effect.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Commit what is queued and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            is_open = True
            while is_open:
                entries = [self._queue.get()]
                while len(entries) < _MAX_WRITES_PER_COMMIT and not self._queue.empty():
                    entries.append(self._queue.get())
                is_open = None not in entries
                batch = [entry for entry in entries if entry is not None]
                if batch:
                    self._commit(connection, batch)

    def _commit(self, connection: Connection, batch: list[tuple[Write, Future[Any]]]) -> None:
        started = time.perf_counter()
        done: list[tuple[Future[Any], Any]] = []
        try:
            with connection.begin():
                for write, future in batch:
                    try:
                        with connection.begin_nested():
                            done.append((future, write(connection)))
                    except Exception as error:
                        future.set_exception(error)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self._on_commit(time.perf_counter() - started, len(batch))
        for future, value in done:
            future.set_result(value)
