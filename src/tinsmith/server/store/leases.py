"""The lease of the servers of one Postgres database: who runs the engines.

Times are by the database's clock. A lease that ran out is taken by whoever asks first, and its
epoch counts up; one that ran out and that nobody took is still its holder's. Everything here
blocks, on a connection of its own, and is for one thread.

With that connection goes a lock under the server's name. A process that dies loses both at once, so
others can see that it left before its lease has run out.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from typing import ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from tinsmith.server.store import schema
from tinsmith.server.store.database import LOCK_NUMBER, TROUBLE, create_engine, unavailable
from tinsmith.server.store.errors import StoreInUseError
from tinsmith.server.store.fence import LEASE
from tinsmith.server.store.migrations.migrate import is_behind, migrate
from tinsmith.server.store.records import LeaseRecord

_STATEMENT_MILLISECONDS = 4000

_IS_CONNECTED = sa.text(
    "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
    " AND granted AND classid::bigint = :high AND objid::bigint = :low AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
)
"""Whether anybody holds a lock with a number of 64 bits, which Postgres shows in two halves."""


class Leases:
    now: ClassVar[sa.ColumnElement[float]] = sa.extract("epoch", sa.func.clock_timestamp()).cast(
        sa.Double
    )
    insert = staticmethod(postgresql.insert)
    patience: ClassVar[dict[str, int]] = {"connect_timeout": 3, "tcp_user_timeout": 4000}

    def __init__(self, url: str, holder: str, place: str, address: str, seconds: float) -> None:
        """`holder` asks for itself, who is at `place` and is reached at `address`; a lease lasts so
        many seconds from when it was taken or renewed."""
        self._engine = create_engine(url, self.patience)
        self._connection: sa.Connection | None = None
        self._connected_at = 0.0
        self._known_epoch = 0
        self._is_known_connected = False
        """Whether the holder with that epoch was connected when we first saw it. Servers of earlier
        releases have no lock under their name."""
        self._holder = holder
        self._seconds = seconds
        own = {"holder": holder, "place": place, "url": address}
        table, end = schema.leases, self.now + seconds
        # Made once: they are carried out every second, for as long as a server lives.
        fresh = {**own, "expires_at": end}
        self._take = (
            self.insert(table)
            .values(name=LEASE, epoch=1, **fresh)
            .on_conflict_do_update(
                index_elements=[table.c.name],
                set_={**fresh, "epoch": table.c.epoch + 1},
                where=sa.or_(table.c.expires_at <= self.now, table.c.place == place),
            )
            .returning(table.c.epoch)
        )
        self._take_from = (
            sa.update(table)
            .where(
                table.c.name == LEASE,
                table.c.holder == sa.bindparam("of_holder"),
                table.c.epoch == sa.bindparam("of_epoch"),
            )
            .values({**fresh, "epoch": table.c.epoch + 1})
            .returning(table.c.epoch)
        )
        self._present = sa.select(table).where(table.c.name == LEASE, table.c.expires_at > self.now)
        ours = sa.update(table).where(
            table.c.name == LEASE,
            table.c.holder == holder,
            table.c.epoch == sa.bindparam("of_epoch"),
        )
        self._renew = ours.values(expires_at=end)
        self._release = ours.values(expires_at=0.0)

    def make_tables(self) -> None:
        """Where there is no table of leases yet, nobody else can be at work: bring all up to date.
        Later steps are for the holder, because the others may be of an earlier release."""
        with self._transaction() as connection:
            is_there = sa.inspect(connection).has_table(schema.leases.name)
        if not is_there:
            migrate(self._engine)

    def take(self) -> int | None:
        """The epoch of the lease if it is ours now; None while another holds it.

        Tables of a later version are refused: that is for a server of that version.
        """
        with self._transaction() as connection:
            epoch = connection.execute(self._take).scalar()
            if epoch is not None:
                is_behind(connection)
            return epoch

    def take_from_dead(self, epoch: int) -> int | None:
        """As `take`, from a holder whose process has ended; None if it may be alive.

        `epoch` is that of the holder, who was not found at its address. Without its connection to
        the database as well, it is gone. Where ours is new, the database may have dropped all of
        them, and a holder that lives is about to have another.
        """
        with self._transaction() as connection:
            if time.monotonic() - self._connected_at < self._seconds:
                return None
            present = connection.execute(self._present).first()
            if present is None or not present.epoch == epoch == self._known_epoch:
                return None
            if not self._is_known_connected or not self._has_left(connection, present.holder):
                return None
            asked = {"of_holder": present.holder, "of_epoch": epoch}
            taken = connection.execute(self._take_from, asked).scalar()
            if taken is not None:
                is_behind(connection)
            return taken

    def renew(self, epoch: int) -> bool:
        """Whether the lease is still ours; if so, it begins anew."""
        return self._set_end(self._renew, epoch)

    def release(self, epoch: int) -> None:
        """Let another have it at once."""
        self._set_end(self._release, epoch)

    def present(self) -> LeaseRecord | None:
        """The lease, if somebody holds it now."""
        with self._transaction() as connection:
            row = connection.execute(self._present).first()
            if row is not None and row.epoch != self._known_epoch:
                self._is_known_connected = not self._has_left(connection, row.holder)
                self._known_epoch = row.epoch
        return None if row is None else LeaseRecord(**row._mapping)

    def store_id(self) -> str | None:
        """The identity that the data folder must have, too; None before the first server."""
        with self._transaction() as connection:
            return connection.execute(sa.select(schema.identity.c.store_id)).scalar()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()

    def _set_end(self, end: sa.Update, epoch: int) -> bool:
        with self._transaction() as connection:
            return connection.execute(end, {"of_epoch": epoch}).rowcount == 1

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            if self._connection is None:
                self._connection = self._connect()
                self._connected_at = time.monotonic()
            with self._connection.begin():
                yield self._connection
        except TROUBLE as error:
            if self._connection is not None:
                self._connection.invalidate()
                self._connection.close()
                self._connection = None
            raise unavailable(error) from error

    def _connect(self) -> sa.Connection:
        """Tools that must be alone, and servers of releases without leases, hold the same lock for
        themselves."""
        connection = self._engine.connect()
        with connection.begin():
            connection.exec_driver_sql(f"SET statement_timeout = {_STATEMENT_MILLISECONDS}")
            lock = sa.select(sa.func.pg_try_advisory_lock_shared(LOCK_NUMBER))
            is_locked = connection.execute(lock).scalar_one()
            # Shared, because an earlier connection of ours may still seem to be there.
            own = sa.func.pg_advisory_lock_shared(_lock_number(self._holder))
            connection.execute(sa.select(own))
        if not is_locked:
            connection.close()
            raise StoreInUseError(
                "a server of an earlier release, or a tool, uses the database "
                f"{self._engine.url!r} for itself; stop it first"
            )
        return connection

    def _has_left(self, connection: sa.Connection, holder: str) -> bool:
        """Whether a server has no connection any more. We look and lock nothing: two who tried the
        lock at once would each take the other's try for the holder's connection."""
        high, low = divmod(_lock_number(holder), 1 << 32)
        numbers = {"high": high % (1 << 32), "low": low}
        return not connection.execute(_IS_CONNECTED, numbers).scalar_one()


def _lock_number(holder: str) -> int:
    """The lock that a server holds as long as it is connected."""
    return int.from_bytes(hashlib.sha256(holder.encode()).digest()[:8], signed=True)
