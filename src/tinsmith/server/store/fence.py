"""What keeps a server that lost its lease from writing: each of its transactions looks first."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.errors import LeaseLostError
from tinsmith.server.store.statements import Run, prepared

LEASE = "engines"
"""The one lease there is: its holder runs the engines and all that is scheduled on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A lease as it was taken: by whom, and as the how manieth."""

    holder: str
    epoch: int
    seconds: float
    """How long a transaction may be left open: whoever takes the lease next waits for it."""

    def prepare(self, connection: sa.Connection) -> None:
        """For each new connection that is to write. A process that is stopped in the middle of a
        transaction is cut off by the database."""
        limit = max(1, int(self.seconds * 1000))
        connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = {limit}")

    def check(self, connection: sa.Connection) -> None:
        """Raise unless the lease is still ours; until this transaction ends nobody takes it."""
        held = _PREPARED.get(connection.dialect.name)
        if held is None:
            held = prepared(connection.dialect, _HELD, ["of_holder", "of_epoch"])
            _PREPARED[connection.dialect.name] = held
        ours = {"of_holder": self.holder, "of_epoch": self.epoch}
        if held(connection, ours).fetchone() is None:
            raise LeaseLostError(
                "another server has taken over; what this one was to write was not written"
            )


_HELD = (
    sa.select(schema.leases.c.epoch)
    .where(
        schema.leases.c.name == LEASE,
        schema.leases.c.holder == sa.bindparam("of_holder"),
        schema.leases.c.epoch == sa.bindparam("of_epoch"),
    )
    .with_for_update(read=True)
)
_PREPARED: dict[str, Run] = {}
"""The same statement by the dialect's name."""
