"""The writing thread: many small writes, one commit.

A commit that reaches the disk takes milliseconds however little it holds. So writes queue up
while one commit is under way, and the next carries all of them; each caller is answered after the
commit that contains its write. When one contradicts what is there, which is rare, all are taken
back and carried out again, each behind a savepoint of its own, so that only the culprit fails. When
the database is in trouble (a full disk, a lost connection) it may have taken back everything
without saying so: then the whole batch has failed, and every caller hears it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from tinsmith.server.store import schema

T = TypeVar("T")

_MAX_WRITES_PER_COMMIT = 512

Write = Callable[[sa.Connection], Any]
Batch = list[tuple[Write, Future[Any]]]
Done = list[tuple[Future[Any], Any]]
OnCommit = Callable[[float, int], None]
"""Hears the seconds and the number of writes of every commit."""

_TROUBLE = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.PendingRollbackError)


class Writes(Protocol):
    """Where a database's writes go. `Writer` carries them out; a simulation, in its own time."""

    def claim(self, claim: Write) -> None: ...

    def count_commits(self, tell: Callable[[int], None]) -> None: ...

    async def run(self, write: Callable[[sa.Connection], T]) -> T: ...

    def close(self) -> None: ...


class CommitCount:
    """Counts commits in the store, and tells somebody outside it of each."""

    def __init__(self) -> None:
        self.tell: Callable[[int], None] | None = None
        self._position: int | None = None

    def add(self, connection: sa.Connection) -> None:
        """Within the transaction. A store that is bound to no folder does not count."""
        if self.tell is not None:
            self._position = connection.execute(_COUNT).scalar()

    def committed(self) -> None:
        if self.tell is not None and self._position is not None:
            self.tell(self._position)


_COUNT = (
    sa.update(schema.identity)
    .values(position=schema.identity.c.position + 1)
    .returning(schema.identity.c.position)
)


class Writer:
    def __init__(
        self, engine: sa.Engine, on_commit: OnCommit, fence: Write = lambda connection: None
    ) -> None:
        """`fence` is called first in every transaction; when it raises, nothing is written."""
        self._engine = engine
        self._on_commit = on_commit
        self._fence = fence
        self._count = CommitCount()
        self._claim: Write | None = None
        self._claimed: object = None
        self._queue: queue.SimpleQueue[tuple[Write, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def claim(self, claim: Write) -> None:
        """Call `claim` on this writer's connection now, and on each that replaces it, before
        anything else is written; when it raises, nothing is."""
        future: Future[None] = Future()

        def adopt(connection: sa.Connection) -> None:
            claim(connection)
            self._claim = claim
            self._claimed = connection.connection.dbapi_connection

        self._queue.put((adopt, future))
        future.result()

    def count_commits(self, tell: Callable[[int], None]) -> None:
        self._count.tell = tell

    async def run(self, write: Callable[[sa.Connection], T]) -> T:
        """Carry out `write` in the writing thread; return when it is on disk.

        It may be carried out more than once, the earlier times without effect.
        """
        future: Future[T] = Future()
        self._queue.put((write, future))
        # A caller who goes away must not take the write with it: others may wait for its effect.
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        """Commit what is queued and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        connection: sa.Connection | None = None
        is_open = True
        while is_open:
            entries = [self._queue.get()]
            while len(entries) < _MAX_WRITES_PER_COMMIT and not self._queue.empty():
                entries.append(self._queue.get())
            is_open = None not in entries
            batch = [entry for entry in entries if entry is not None]
            if not batch:
                continue
            try:
                connection = connection or self._engine.connect()
                commit(connection, batch, self._prepare, self._committed)
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
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
        self._on_commit(seconds, num_writes)


def commit(
    connection: sa.Connection,
    batch: Batch,
    prepare: Write,
    on_commit: OnCommit,
) -> None:
    """Carry out the writes of a batch in one transaction and answer each; raises when the
    transaction as a whole failed."""
    started = time.perf_counter()
    try:
        with connection.begin():
            prepare(connection)
            done = [(future, write(connection)) for write, future in batch]
    except _TROUBLE:
        raise
    except Exception:
        done = _commit_one_by_one(connection, batch, prepare)
    on_commit(time.perf_counter() - started, len(batch))
    for future, value in done:
        future.set_result(value)


def _commit_one_by_one(connection: sa.Connection, batch: Batch, prepare: Write) -> Done:
    """Answer those whose write fails by itself; the others' values, once they are on disk."""
    done: Done = []
    with connection.begin():
        prepare(connection)
        for write, future in batch:
            try:
                with connection.begin_nested():
                    done.append((future, write(connection)))
            except _TROUBLE:
                # SQLite ends the transaction by itself when the disk is full, and would then
                # commit nothing without complaint; a lost connection has lost it, too.
                raise
            except Exception as error:
                future.set_exception(error)
    return done
