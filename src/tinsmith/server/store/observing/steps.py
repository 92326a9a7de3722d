"""Steps: what stays of operations that ended, and the metrics that clients post beside them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import orjson
import sqlalchemy as sa

from tinsmith.errors import ValidationError
from tinsmith.server.store import schema
from tinsmith.server.store.database import Database
from tinsmith.server.store.observing.curves import redraw
from tinsmith.server.store.records import OperationStatus, StepRecord
from tinsmith.types.non_finite import to_json
from tinsmith.types.observing import MAX_POSTED_KEYS

POSTED = "posted"


class Steps:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._append = database.appender(schema.steps)
        with database.connect() as connection:
            last = connection.execute(sa.select(sa.func.max(schema.steps.c.entry_id))).scalar()
        # One server writes to a store, so that it knows the next number without asking.
        self._numbers = itertools.count((last or 0) + 1)

    def add(self, connection: sa.Connection, step: StepRecord) -> int:
        """Record a step as part of a write; its number."""
        number = next(self._numbers)
        self._append(connection, (*step[:-1], number))
        return number

    async def post(self, step: StepRecord, metrics: Mapping[str, float]) -> StepRecord:
        """Record metrics of a client's own under a step. Names that the step has already get the
        new values, and the others stay; the same request again changes nothing more."""
        table = schema.steps
        same = sa.and_(
            table.c.model_id == step.model_id,
            table.c.source == POSTED,
            table.c.seq_id == step.seq_id,
        )

        def write(connection: sa.Connection) -> StepRecord:
            known = connection.execute(sa.select(table.c.metrics).where(same)).scalar()
            given = {name: to_json(value) for name, value in metrics.items()}
            together = {**orjson.loads(known or "{}"), **given}
            if len(together) > MAX_POSTED_KEYS:
                raise ValidationError(
                    f"step {step.seq_id} would have {len(together)} metrics; the limit is "
                    f"{MAX_POSTED_KEYS}",
                    "metrics",
                )
            connection.execute(sa.delete(table).where(same))
            merged = step._replace(metrics=orjson.dumps(together).decode())
            number = self.add(connection, merged)
            redraw(connection, self._database, step.model_id, step.seq_id)
            return merged._replace(entry_id=number)

        return await self._database.write(write)

    async def posted_bytes(self, owner: str) -> int:
        """What the metrics take that an owner has posted; looks at all of them."""
        steps, models = schema.steps, schema.models
        query = (
            sa.select(sa.func.sum(sa.func.length(steps.c.metrics)))
            .join(models, models.c.model_id == steps.c.model_id)
            .where(models.c.owner == owner, steps.c.source == POSTED)
        )

        def read() -> int:
            with self._database.connect() as connection:
                return int(connection.execute(query).scalar() or 0)

        return await self._database.in_thread(read)

    async def newest(
        self, model_id: str, before: int, limit: int, status: OperationStatus | None = None
    ) -> Sequence[StepRecord]:
        """A run's operations that ended with a number below `before`, the last ones first."""
        table = schema.steps
        query = sa.select(table).where(
            table.c.model_id == model_id, table.c.source == "operation", table.c.seq_id < before
        )
        if status is not None:
            query = query.where(table.c.status == status)
        return await self._database.all(
            StepRecord, query.order_by(table.c.seq_id.desc()).limit(limit)
        )

    async def made(self, model_id: str) -> dict[str, int]:
        """What a run's operations made, checkpoints and samplers, and the number of each."""
        table = schema.steps
        query = sa.select(table.c.made, table.c.seq_id).where(
            table.c.model_id == model_id, table.c.made.is_not(None)
        )
        return dict(await self._database.all(lambda made, seq_id: (made, seq_id), query))

    async def last_entry(self) -> int:
        """The number of the newest entry of all."""
        query = sa.select(sa.func.coalesce(sa.func.max(schema.steps.c.entry_id), 0))

        def read() -> int:
            with self._database.connect() as connection:
                return int(connection.execute(query).scalar_one())

        return await self._database.in_thread(read)

    async def since(
        self, entry_id: int, owner: str, model_id: str | None, limit: int
    ) -> Sequence[StepRecord]:
        """What was recorded after an entry for an owner, or for one run of his, in order."""
        steps, models = schema.steps, schema.models
        query = (
            sa.select(steps)
            .join(models, models.c.model_id == steps.c.model_id)
            .where(steps.c.entry_id > entry_id, models.c.owner == owner)
        )
        if model_id is not None:
            query = query.where(steps.c.model_id == model_id)
        return await self._database.all(StepRecord, query.order_by(steps.c.entry_id).limit(limit))
