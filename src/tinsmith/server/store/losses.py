"""Custom losses: traced functions that clients upload, numbered within their session."""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.records import CustomLossRecord


class CustomLosses:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, loss: CustomLossRecord) -> CustomLossRecord:
        """The loss, or the earlier one with the same session and number."""
        table = schema.custom_losses

        def write(connection: sa.Connection) -> CustomLossRecord:
            if self._database.put_new(connection, table, row_of(loss)):
                return loss
            found = connection.execute(
                sa.select(table).where(
                    table.c.session_id == loss.session_id,
                    table.c.custom_loss_seq_id == loss.custom_loss_seq_id,
                )
            )
            return CustomLossRecord(**found.one()._mapping)

        return await self._database.write(write)

    async def get(self, loss_id: str) -> CustomLossRecord | None:
        return await self._find(schema.custom_losses.c.loss_id == loss_id)

    async def of_request(self, request_id: str) -> CustomLossRecord | None:
        """The loss whose upload was answered with this request id."""
        return await self._find(schema.custom_losses.c.request_id == request_id)

    async def _find(self, which: sa.ColumnElement[bool]) -> CustomLossRecord | None:
        query = sa.select(schema.custom_losses).where(which)
        return await self._database.one(CustomLossRecord, query)
