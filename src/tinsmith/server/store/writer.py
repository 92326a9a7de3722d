"""The writing thread: many small writes, one commit.

A commit that reaches the disk takes milliseconds however little it holds. So writes queue up
while one commit is under way, and the next carries all of them; when it begins, `pacing` says.
Each caller is answered after the commit that contains its write. When one contradicts what is
there, which is rare, all are taken back and carried out again, each behind a savepoint of its own,
so that only the culprit fails. When the database is in trouble (a full disk, a lost connection) it
may have taken back everything without saying so: then the whole batch has failed, and every caller
hears it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.pacing import Pacing
from tinsmith.server.store.statements import Run, prepared
from tinsmith.server.store.wal import WalKeeper

T = TypeVar("T")

_MAX_WRITES_PER_COMMIT = 512

Write = Callable[[sa.Connection], Any]
End = tuple[Any, Exception | None]
"""What a write gave, or why it failed."""

Waiter = asyncio.Future[Any] | Future[Any]
"""Who waits for a write: on an event loop, or in a thread."""

OnCommit = Callable[[float, int], None]
"""Hears the seconds and the number of writes of every commit."""

_TROUBLE = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.PendingRollbackError)


class Writes(Protocol):
    """Where a database's writes go. `Writer` carries them out; a simulation, in its own time."""

    def claim(self, claim: Write) -> None: ...

    def count_commits(self, tell: Callable[[int], None]) -> None: ...

    async def run(self, write: Callable[[sa.Connection], T]) -> T: ...

    def close(self) -> None: ...


OpenWriter = Callable[[sa.Engine, OnCommit, Write], Writes]
"""Makes one; the last is the fence, called first in every transaction: when it raises, nothing is
written."""


def no_fence(connection: sa.Connection) -> None:
    """Of the only server of a store."""


class CommitCount:
    """Counts commits in the store, and tells somebody outside it of each."""

    def __init__(self) -> None:
        self.tell: Callable[[int], None] | None = None
        self._position: int | None = None
        self._count: Run | None = None

    def add(self, connection: sa.Connection) -> None:
        """Within the transaction. A store that is bound to no folder does not count."""
        if self.tell is not None:
            if self._count is None:
                self._count = prepared(connection.dialect, _COUNT)
            row = self._count(connection, {}).fetchone()
            self._position = None if row is None else row[0]

    def committed(self) -> None:
        if self.tell is not None and self._position is not None:
            self.tell(self._position)


_COUNT = (
    sa.update(schema.identity)
    .values(position=schema.identity.c.position + 1)
    .returning(schema.identity.c.position)
)


class Writer:
    def __init__(self, engine: sa.Engine, on_commit: OnCommit, fence: Write = no_fence) -> None:
        self._engine = engine
        self._on_commit = on_commit
        self._fence = fence
        self._count = CommitCount()
        self._claim: Write | None = None
        self._claimed: object = None
        self._pacing = Pacing()
        self._wal = WalKeeper(engine) if engine.dialect.name == "sqlite" else None
        self._queue: queue.SimpleQueue[tuple[Write, Waiter] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def claim(self, claim: Write) -> None:
        """Call `claim` on this writer's connection now, and on each that replaces it, before
        anything else is written; when it raises, nothing is."""
        waiter: Future[None] = Future()

        def adopt(connection: sa.Connection) -> None:
            claim(connection)
            self._claim = claim
            self._claimed = connection.connection.dbapi_connection

        self._queue.put((adopt, waiter))
        waiter.result()

    def count_commits(self, tell: Callable[[int], None]) -> None:
        self._count.tell = tell

    async def run(self, write: Callable[[sa.Connection], T]) -> T:
        """Carry out `write` in the writing thread; return when it is on disk.

        It may be carried out more than once, the earlier times without effect. A caller who goes
        away does not take it along: others may wait for its effect.
        """
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put((write, waiter))
        return await waiter

    def close(self) -> None:
        """Commit what is queued and stop."""
        self._queue.put(None)
        self._thread.join()
        if self._wal is not None:
            self._wal.close()

    def _run(self) -> None:
        connection: sa.Connection | None = None
        is_open = True
        while is_open:
            entries = [self._queue.get()]
            if pause := self._pacing.wait(time.monotonic()):
                time.sleep(pause)
            while len(entries) < _MAX_WRITES_PER_COMMIT and not self._queue.empty():
                entries.append(self._queue.get())
            is_open = None not in entries
            batch = [entry for entry in entries if entry is not None]
            if not batch:
                continue
            self._pacing.begin(len(batch), time.monotonic())
            try:
                connection = connection or self._engine.connect()
                writes = [write for write, _ in batch]
                ends = commit(connection, writes, self._prepare, self._committed)
            except Exception as error:
                ends = [(None, error)] * len(batch)
            _answer([waiter for _, waiter in batch], ends)
        if connection is not None:
            connection.close()

    def _prepare(self, connection: sa.Connection) -> None:
        """After a connection was lost, make the claim again on the one that came instead."""
        present = connection.connection.dbapi_connection
        if self._claim is not None and present is not self._claimed:
            self._claim(connection)
            self._claimed = present
        self._fence(connection)
        self._count.add(connection)

    def _committed(self, seconds: float, num_writes: int) -> None:
        self._count.committed()
        if self._wal is not None:
            self._wal.committed()
        self._on_commit(seconds, num_writes)


def commit(
    connection: sa.Connection, writes: Sequence[Write], prepare: Write, on_commit: OnCommit
) -> list[End]:
    """Carry out writes in one transaction; how each ended. Raises when the transaction as a whole
    failed."""
    started = time.perf_counter()
    ends: list[End]
    try:
        with connection.begin():
            prepare(connection)
            ends = [(write(connection), None) for write in writes]
    except _TROUBLE:
        raise
    except Exception:
        ends = _commit_one_by_one(connection, writes, prepare)
    on_commit(time.perf_counter() - started, len(writes))
    return ends


def _commit_one_by_one(
    connection: sa.Connection, writes: Sequence[Write], prepare: Write
) -> list[End]:
    ends: list[End] = []
    with connection.begin():
        prepare(connection)
        for write in writes:
            try:
                with connection.begin_nested():
                    ends.append((write(connection), None))
            except _TROUBLE:
                # SQLite ends the transaction by itself when the disk is full, and would then
                # commit nothing without complaint; a lost connection has lost it, too.
                raise
            except Exception as error:
                ends.append((None, error))
    return ends


def settle(waiter: Waiter, end: End) -> None:
    """Tell who waits how it ended; where that is an event loop, from there."""
    value, error = end
    if waiter.done():
        return  # gone away
    if error is None:
        waiter.set_result(value)
    else:
        waiter.set_exception(error)


def _answer(waiters: Sequence[Waiter], ends: Sequence[End]) -> None:
    """Those on one event loop are told together: to wake it costs more than the telling."""
    of_loop: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, End]]] = {}
    for waiter, end in zip(waiters, ends, strict=True):
        if isinstance(waiter, Future):
            settle(waiter, end)
        else:
            of_loop.setdefault(waiter.get_loop(), []).append((waiter, end))
    for loop, told in of_loop.items():
        with contextlib.suppress(RuntimeError):  # closed: nobody waits any more
            loop.call_soon_threadsafe(_settle_all, told)


def _settle_all(told: Sequence[tuple[Waiter, End]]) -> None:
    for waiter, end in told:
        settle(waiter, end)
