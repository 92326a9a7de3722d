"""The database that several servers share: SQLite, with a clock of its own and with outages.

The lease's statements and the fence's are the real ones, but for the clock that they read.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from tests.support.simulated_server import LoopWriter
from tinsmith.server.replicas.lease import Lease
from tinsmith.server.store.leases import Leases
from tinsmith.server.store.writer import OnCommit, Write

FEW_LOST_ANSWERS = 0.01
_COMMIT_SECONDS = (0.0, 0.03, 0.15)
_AWAY = "the simulated database is away"


class SimulatedDatabase:
    def __init__(self, random: random.Random, url: str) -> None:
        self._random = random
        self.url = url
        self.is_away = False
        self.lost_answers = FEW_LOST_ANSWERS
        """How many commits are made and not confirmed: the connection breaks."""
        self.clock_error = 0.0
        self.sessions: dict[str, str] = {}
        """The servers that are connected, as holders of a lease, and where they are."""
        self.num_faults = 0
        """Answers that were lost."""

    def now(self) -> float:
        return 1_000_000.0 + asyncio.get_running_loop().time() + self.clock_error

    def check(self) -> None:
        if self.is_away:
            raise _lost()

    def check_session(self, holder: str) -> None:
        self.check()
        if holder not in self.sessions:
            raise _lost()

    def end_sessions(self, place: str) -> None:
        """A process has ended; or it lives, and finds out when it next asks."""
        self.sessions = {holder: at for holder, at in self.sessions.items() if at != place}

    def writer(self, engine: sa.Engine, on_commit: OnCommit, fence: Write) -> LoopWriter:
        return _Writer(self, self._random, engine, on_commit, fence)

    def leases(self, holder: str, place: str, seconds: float) -> Leases:
        return _Leases(self, holder, place, seconds)


class _Writer(LoopWriter):
    def __init__(
        self,
        database: SimulatedDatabase,
        random: random.Random,
        engine: sa.Engine,
        on_commit: OnCommit,
        fence: Write,
    ) -> None:
        super().__init__(random, engine, on_commit, fence, _COMMIT_SECONDS)
        self._database = database

    def claim(self, claim: Write) -> None:
        """What a connection to Postgres is told is nothing to SQLite."""

    def _commit(self) -> None:
        queued = self._queued
        try:
            self._database.check()
            super()._commit()
        except Exception as error:
            # Where the fence refused, all were refused.
            self._queued = []
            for _, future in queued:
                if not future.done():
                    future.set_exception(error)

    def _committed(self, seconds: float, num_writes: int) -> None:
        super()._committed(seconds, num_writes)
        if self._random.random() < self._database.lost_answers:
            self._database.num_faults += 1
            raise _lost()


class _Leases(Leases):
    now = sa.func.simulated_now(type_=sa.Double)
    insert = staticmethod(sqlite.insert)
    patience: ClassVar[dict[str, int]] = {}

    def __init__(
        self, database: SimulatedDatabase, holder: str, place: str, seconds: float
    ) -> None:
        super().__init__(database.url, holder, place, place, seconds)
        self._database = database
        self._place = place

        # What the engine calls must not refer to the connection: the dead never close theirs, and
        # it would stay open for ever.
        def add_clock(connection: Any, _: Any) -> None:
            connection.create_function("simulated_now", 0, database.now)

        sa.event.listen(self._engine, "connect", add_clock)
        sa.event.listen(self._engine, "begin", lambda connection: database.check_session(holder))

    def _connect(self) -> sa.Connection:
        self._database.check()
        self._database.sessions[self._holder] = self._place
        return self._engine.connect()

    def _has_left(self, connection: sa.Connection, holder: str) -> bool:
        return holder not in self._database.sessions

    def close(self) -> None:
        super().close()
        self._database.sessions.pop(self._holder, None)


class LoopLease(Lease):
    """Asked for and kept by a task, which is late when its process is stopped."""

    _asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.view = await asyncio.to_thread(self._first)
        self._asking = asyncio.create_task(self._go_on_asking(), name="lease")

    async def close(self) -> None:
        self._is_ending.set()
        if self._asking is not None:
            await self._asking
        await asyncio.to_thread(self._end)

    async def _go_on_asking(self) -> None:
        is_asking = True
        while is_asking:
            await asyncio.sleep(self._pause())
            is_asking = not self._is_ending.is_set() and self._ask(asyncio.get_running_loop())


def _lost() -> sa.exc.OperationalError:
    return sa.exc.OperationalError(_AWAY, None, OSError(_AWAY))
