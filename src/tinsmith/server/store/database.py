"""One database, SQLite or Postgres: connections, the writing thread, and the few statements that
the parts of the store are built from.

SQLite runs in WAL mode with full sync: a commit is on disk when it returns. All writes go through
one thread (`writer`), reads through a few more, so the event loop never waits for a disk; readers
serve owners in turn, and none has more than half of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinsmith.server.edge.owners import owner_at_work
from tinsmith.server.edge.workers import Workers
from tinsmith.server.store import schema, wal
from tinsmith.server.store.errors import (
    StoreConflictError,
    StoreInUseError,
    StoreUnavailableError,
    StoreValueError,
)
from tinsmith.server.store.fence import Fence
from tinsmith.server.store.migrations.migrate import migrate
from tinsmith.server.store.records import Page
from tinsmith.server.store.statements import Run, appender, begin_in_sqlite, prepared
from tinsmith.server.store.writer import OnCommit, OpenWriter, Writer, no_fence

T = TypeVar("T")
R = TypeVar("R")

_READ_THREADS = 8
LOCK_NUMBER = 0x71A5_1714
"""What is locked in a Postgres database, by several servers together or by one tool alone; any
number that others do not use."""

LOCK_SECONDS = 3.0

TROUBLE = (
    sa.exc.OperationalError,
    sa.exc.InterfaceError,
    sa.exc.PendingRollbackError,
    sa.exc.TimeoutError,
    OSError,
)
"""What is raised while a database is away, or a disk is full or broken."""


_NO_SUCH_VALUE = (sa.exc.DataError, OverflowError, UnicodeEncodeError)
"""What is raised for a value that the database has no room for in any row."""


def sqlite_url(file: Path) -> str:
    return f"sqlite:///{file}"


class Database:
    def __init__(
        self,
        url: str,
        on_commit: OnCommit,
        open_writer: OpenWriter = Writer,
        fence: Fence | None = None,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self._lock_seconds = lock_seconds
        self._engine = create_engine(url)
        self.insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        try:
            migrate(self._engine, *([] if fence is None else [fence.check]))
        except BaseException:
            self._engine.dispose()
            raise
        self._put_new: dict[str, sa.Executable] = {}
        self._readers = Workers("store-reader", _READ_THREADS)
        check = no_fence if fence is None else fence.check
        self._writer = open_writer(self._engine, on_commit, check)
        if fence is not None:
            self._writer.claim(fence.prepare)

    async def keep_others_out(self) -> None:
        """A file's lock keeps other servers off a data folder; this keeps them off a Postgres
        database. It goes with the connection, so it is held by the one that writes."""
        if self._engine.dialect.name == "postgresql":
            await self.in_thread(self._writer.claim, self._lock_soon)

    async def confirm(self) -> None:
        """Returns when this server is known to be the one that may write, and raises otherwise."""
        await self.write(lambda connection: None)

    def count_commits(self, tell: Callable[[int], None]) -> None:
        self._writer.count_commits(tell)

    def _lock_soon(self, connection: sa.Connection) -> None:
        """Take the lock; the database may not have noticed yet that its last holder is dead."""
        deadline = time.monotonic() + self._lock_seconds
        while True:
            try:
                return self._lock(connection)
            except StoreInUseError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _lock(self, connection: sa.Connection) -> None:
        lock = sa.select(sa.func.pg_try_advisory_lock(LOCK_NUMBER))
        if not connection.execute(lock).scalar_one():
            raise StoreInUseError(f"another server uses the database {self._engine.url!r}")
        # One that lost its connection, and with it the lock, must not go on writing.
        connection.execute(
            sa.update(schema.leases).values(epoch=schema.leases.c.epoch + 1, expires_at=0.0)
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.close)
        self._readers.close(wait=True)
        self._engine.dispose()

    def connect(self) -> sa.Connection:
        """A connection for reading, for use in a reader's thread."""
        return self._engine.connect()

    async def write(self, write: Callable[[sa.Connection], T]) -> T:
        try:
            return await self._writer.run(write)
        except sa.exc.IntegrityError as error:
            raise StoreConflictError(str(error.orig)) from error
        except _NO_SUCH_VALUE as error:
            raise StoreValueError(f"a value cannot be stored: {_reason(error)}") from error
        except TROUBLE as error:
            raise unavailable(error) from error

    async def execute(self, statement: sa.UpdateBase) -> int:
        return await self.write(lambda connection: connection.execute(statement).rowcount)

    async def execute_many(self, statement: sa.UpdateBase, rows: list[dict[str, Any]]) -> None:
        if rows:
            await self.write(lambda connection: connection.execute(statement, rows))

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that waits for the disk or the database, in a reader's thread."""
        try:
            return await self._readers.run(owner_at_work(), function, *args)
        except TROUBLE as error:
            raise unavailable(error) from error

    async def all(
        self, kind: Callable[..., R], query: sa.Select[Any], values: Mapping[str, Any] | None = None
    ) -> list[R]:
        """`values` are for the names that the query leaves open."""

        def read() -> list[R]:
            with self.connect() as connection:
                return [kind(**row._mapping) for row in connection.execute(query, values)]

        try:
            return await self.in_thread(read)
        except _NO_SUCH_VALUE:
            # Asked for by a value that no row can have.
            return []

    async def one(
        self, kind: Callable[..., R], query: sa.Select[Any], values: Mapping[str, Any] | None = None
    ) -> R | None:
        found = await self.all(kind, query, values)
        return found[0] if found else None

    async def column(self, query: sa.Select[Any]) -> list[str]:
        def read() -> list[str]:
            with self.connect() as connection:
                return list(connection.execute(query).scalars())

        return await self.in_thread(read)

    async def page(
        self,
        kind: Callable[..., R],
        query: sa.Select[Any],
        order: list[sa.Column[Any]],
        limit: int,
        offset: int,
    ) -> Page[R]:
        newest_first = query.order_by(*(column.desc() for column in order))

        def read() -> Page[R]:
            with self.connect() as connection:
                rows = connection.execute(newest_first.limit(limit).offset(offset))
                items = [kind(**row._mapping) for row in rows]
                counted = sa.select(sa.func.count()).select_from(query.subquery())
                return Page(items, connection.execute(counted).scalar_one())

        return await self.in_thread(read)

    def prepared(self, statement: sa.Executable, names: Sequence[str]) -> Run:
        """For a statement that runs for every operation; `names` are its values."""
        return prepared(self._engine.dialect, statement, names)

    def appender(self, table: sa.Table) -> Callable[[sa.Connection, Sequence[Any]], None]:
        """A function that adds a row, given its values in the order of the columns."""
        return appender(self._engine.dialect, table)

    def put_new(self, connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> bool:
        """Insert a row unless one with the same key is there; whether it was inserted."""
        statement = self._put_new.get(table.name)
        if statement is None:
            # Made once: building a statement and its cache key costs more than carrying it out.
            key = next(iter(table.primary_key.columns))
            statement = self.insert(table).on_conflict_do_nothing().returning(key)
            self._put_new[table.name] = statement
        return connection.execute(statement, values).first() is not None


def create_engine(url: str, connect_args: dict[str, Any] | None = None) -> sa.Engine:
    """Connections to a database, set up as ours are."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "postgresql" and parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    engine = sa.create_engine(
        parsed,
        pool_size=_READ_THREADS + 2,
        # A connection that was lost while nobody used it is replaced without a word. A file is
        # never lost.
        pool_pre_ping=parsed.get_backend_name() == "postgresql",
        connect_args=connect_args or {},
    )
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", begin_in_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # The driver's own idea of when a transaction begins breaks savepoints; we say BEGIN ourselves.
    connection.isolation_level = None
    for setting in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "busy_timeout=30000",
        "journal_size_limit=67108864",
        wal.SETTING,
    ):
        connection.execute(f"PRAGMA {setting}")


def unavailable(error: BaseException) -> StoreUnavailableError:
    """What went wrong first: cleaning up after it may have failed as well."""
    first: BaseException = error
    seen: BaseException | None = error
    while seen is not None:
        first = seen if isinstance(seen, TROUBLE) else first
        seen = seen.__context__
    return StoreUnavailableError(f"the store cannot be used now: {_reason(first)}")


def _reason(error: BaseException) -> object:
    return getattr(error, "orig", None) or error


def large_texts(columns: Sequence[sa.ColumnElement[Any]], above: int) -> sa.ColumnElement[Any]:
    """The sum over rows of what texts take that are longer than so much."""
    sizes = [sa.func.coalesce(sa.func.length(sa.cast(each, sa.Text)), 0) for each in columns]
    counted = [sa.case((size > above, size), else_=0) for size in sizes]
    return sa.func.sum(sum(counted, start=sa.literal(0)))


def row_of(record: Any) -> dict[str, Any]:
    """A record as a row; unlike `asdict` it does not copy payloads."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
