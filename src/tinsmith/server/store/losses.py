"""Custom losses: traced functions that clients upload, numbered within their session.

An owner may have so many of them. One that nobody has used for a while is deleted, unless a pass
that may have to be run again could refer to it: such a pass was recorded after the loss was used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.errors import OverQuotaError, StoreValueError
from tinsmith.server.store.records import CustomLossRecord

USE_SECONDS = 3600.0
"""How far `used_at` may be behind: a use is not written down for every pass."""

_TABLE = schema.custom_losses


@dataclass(frozen=True, slots=True)
class LossBounds:
    """What one owner's losses may be together."""

    max_number: int = 4096
    max_bytes: int = 64 * 1024 * 1024


class CustomLosses:
    def __init__(self, database: Database, bounds: LossBounds) -> None:
        self._database = database
        self._bounds = bounds

    async def add(self, loss: CustomLossRecord) -> CustomLossRecord:
        """The loss, or the earlier one with the same session and number."""

        def write(connection: sa.Connection) -> CustomLossRecord:
            if self._database.put_new(connection, _TABLE, row_of(loss)):
                self._check_room(connection, loss.owner)
                return loss
            found = connection.execute(
                sa.select(_TABLE).where(
                    _TABLE.c.session_id == loss.session_id,
                    _TABLE.c.custom_loss_seq_id == loss.custom_loss_seq_id,
                )
            )
            return CustomLossRecord(**found.one()._mapping)

        return await self._database.write(write)

    def _check_room(self, connection: sa.Connection, owner: str) -> None:
        """Undo the write of a loss that is one too many."""
        number, total = connection.execute(
            sa.select(sa.func.count(), sa.func.sum(_TABLE.c.num_bytes)).where(
                _TABLE.c.owner == owner
            )
        ).one()
        most, problem = self._bounds, ""
        if number > most.max_number:
            problem = f"this owner has {most.max_number} uploaded losses, which is the most"
        elif total > most.max_bytes:
            problem = (
                f"this owner's uploaded losses would have {total} bytes; at most {most.max_bytes} "
                "may be"
            )
        if problem:
            raise OverQuotaError(
                f"{problem}: use the losses that are there again, since one upload serves any "
                "number of passes; unused ones are deleted after a while"
            )

    async def get(self, loss_id: str) -> CustomLossRecord | None:
        return await self._find(_TABLE.c.loss_id == loss_id)

    async def of_request(self, request_id: str) -> CustomLossRecord | None:
        """The loss whose upload was answered with this request id."""
        return await self._find(_TABLE.c.request_id == request_id)

    async def note_use(self, loss_id: str, owner: str, at: float) -> bool:
        """A pass that uses it is about to be recorded; whether there is such a loss."""
        noted = (
            sa.update(_TABLE)
            .where(_TABLE.c.loss_id == loss_id, _TABLE.c.owner == owner)
            .values(used_at=at)
        )
        try:
            return await self._database.execute(noted) > 0
        except StoreValueError:
            return False  # no row can have that id

    async def delete_unused(self, before: float) -> int:
        """Delete those not used since a moment that nothing refers to; how many there were."""
        owners = await self._database.column(
            sa.select(_TABLE.c.owner).where(_TABLE.c.used_at < before).distinct()
        )
        if not owners:
            return 0
        oldest = await self._oldest_that_may_run(owners)

        def write(connection: sa.Connection) -> int:
            # Those used since they were looked for have a later `used_at`.
            statements = (
                sa.delete(_TABLE).where(
                    _TABLE.c.owner == owner,
                    _TABLE.c.used_at < min(before, oldest.get(owner, math.inf) - USE_SECONDS),
                )
                for owner in owners
            )
            return sum(connection.execute(statement).rowcount for statement in statements)

        return await self._database.write(write)

    async def _oldest_that_may_run(self, owners: list[str]) -> dict[str, float]:
        """When the first of each owner's operations was recorded that may still be run."""
        table = schema.operations
        query = (
            sa.select(table.c.owner, sa.func.min(table.c.created_at).label("at"))
            .where(
                table.c.owner.in_(owners),
                sa.or_(table.c.payload.is_not(None), table.c.payload_file.is_not(None)),
            )
            .group_by(table.c.owner)
        )

        def read() -> dict[str, float]:
            with self._database.connect() as connection:
                return {row.owner: row.at for row in connection.execute(query)}

        return await self._database.in_thread(read)

    async def _find(self, which: sa.ColumnElement[bool]) -> CustomLossRecord | None:
        return await self._database.one(CustomLossRecord, sa.select(_TABLE).where(which))
