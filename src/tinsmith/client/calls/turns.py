"""Sequence ids, and the turn in which each request may leave.

Ids are reserved when an operation is called, in program order. A request leaves when every request
with a smaller id has left: been answered, refused, or given up. Results are not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any


class Turns:
    """The ids 1, 2, 3, … of one model. `reserve` is for any thread, the rest for the I/O loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_id = 1
        self._turn = 1
        self._finished: set[int] = set()
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    def reserve(self, count: int = 1) -> range:
        with self._lock:
            ids = range(self._next_id, self._next_id + count)
            self._next_id += count
        return ids

    @contextlib.asynccontextmanager
    async def take(self, seq_id: int, *, after: int | None = None) -> AsyncIterator[None]:
        """Wait for the turn of `seq_id`, and end it on leaving, whatever happens.

        `after` lets requests of one operation leave together: each waits for the turn of their
        first id only.
        """
        try:
            await self._wait(seq_id if after is None else after)
            yield
        finally:
            self.finish(seq_id)

    def is_finished(self, seq_id: int) -> bool:
        return seq_id < self._turn or seq_id in self._finished

    def finish(self, seq_id: int) -> None:
        """The turn of `seq_id` is over, even if it never began; a second time changes nothing."""
        if self.is_finished(seq_id):
            return
        self._finished.add(seq_id)
        while self._turn in self._finished:
            self._finished.remove(self._turn)
            self._turn += 1
            for waiter in self._waiting.pop(self._turn, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def release_after(
        self, operation: Future[Any], ids: range, loop: asyncio.AbstractEventLoop
    ) -> None:
        """An operation that was cancelled before it began must not hold up the next."""

        def release(_: Future[Any]) -> None:
            for seq_id in ids:
                if not self.is_finished(seq_id):
                    loop.call_soon_threadsafe(self.finish, seq_id)

        operation.add_done_callback(release)

    async def _wait(self, seq_id: int) -> None:
        if self._turn >= seq_id:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(seq_id, []).append(waiter)
        await waiter
