"""Examples: what runs were trained on and answered, as much as an owner's share of room holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.observing.all_steps import ALL_STEPS
from tinsmith.server.store.records import ExampleRecord

_TABLE = schema.examples
MOST_TOKENS = 8192
"""Of one sequence; `length` tells of how many these are the first."""


class SampledExample(NamedTuple):
    record: ExampleRecord
    made: str
    """The sampler, or the checkpoint, that it was sampled from."""


class Examples:
    def __init__(self, database: Database, max_owner_bytes: int) -> None:
        self._database = database
        self._max_owner_bytes = max_owner_bytes

    def add(self, connection: sa.Connection, example: ExampleRecord) -> None:
        """Keep an example as part of a write; the owner's oldest make room for it, and one that
        would not fit into an empty share is left out."""
        if example.num_bytes > self._max_owner_bytes:
            return
        is_own = _TABLE.c.owner == example.owner
        held = connection.execute(sa.select(sa.func.sum(_TABLE.c.num_bytes)).where(is_own)).scalar()
        excess = int(held or 0) + example.num_bytes - self._max_owner_bytes
        oldest = sa.select(_TABLE.c.entry_id, _TABLE.c.num_bytes).where(is_own)
        if excess > 0:
            # Some more than is needed, so that not each new one has to look for room.
            excess += self._max_owner_bytes // 16
            for row in connection.execute(oldest.order_by(_TABLE.c.entry_id)).all():
                connection.execute(sa.delete(_TABLE).where(_TABLE.c.entry_id == row.entry_id))
                excess -= row.num_bytes
                if excess <= 0:
                    break
        values = {name: value for name, value in row_of(example).items() if name != "entry_id"}
        connection.execute(sa.insert(_TABLE).values(values))

    async def add_sampled(self, examples: Sequence[SampledExample]) -> None:
        """Keep answers, each under the operation that made the weights it was sampled from. Of
        weights from before operations were recorded there is none to show them under."""
        steps = ALL_STEPS

        def write(connection: sa.Connection) -> None:
            for example, made in examples:
                number = connection.execute(
                    sa.select(sa.func.max(steps.c.seq_id)).where(
                        steps.c.model_id == example.model_id, steps.c.made == made
                    )
                ).scalar()
                if number is not None:
                    self.add(connection, dataclasses.replace(example, seq_id=number))

        if examples:
            await self._database.write(write)

    async def of_run(
        self, model_id: str, seq_id: int | None, limit: int
    ) -> Sequence[ExampleRecord]:
        """A run's examples of one operation in their order, or the newest of all first."""
        query = sa.select(_TABLE).where(_TABLE.c.model_id == model_id)
        if seq_id is not None:
            query = query.where(_TABLE.c.seq_id == seq_id).order_by(_TABLE.c.entry_id)
        else:
            query = query.order_by(_TABLE.c.seq_id.desc(), _TABLE.c.entry_id)
        return await self._database.all(ExampleRecord, query.limit(limit))
