"""Steps: what stays of operations that ended, and the metrics that clients post beside them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import orjson
import sqlalchemy as sa

from tinsmith.errors import ValidationError
from tinsmith.server.store import schema
from tinsmith.server.store.database import Database
from tinsmith.server.store.observing.all_steps import ALL_STEPS, LOGGED, compared
from tinsmith.server.store.observing.curves import redraw
from tinsmith.server.store.records import OperationStatus, StepRecord
from tinsmith.types.non_finite import to_json
from tinsmith.types.observing import MAX_POSTED_KEYS

POSTED = "posted"
_MOST_LOOKED_AT = 20_000
"""New entries, of all owners, among which those of one are looked for: this many take 40 ms."""

# Written out: only so does a database see that the index of posted steps has them all.
_IS_POSTED = schema.steps.c.source == sa.literal_column("'posted'")


class Steps:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._append = database.appender(schema.steps)
        moved = sa.select(sa.func.max(schema.models.c.trimmed_entry_id))
        with database.connect() as connection:
            self._moved: int = connection.execute(moved).scalar() or 0
            last = self._last_entry(connection)
        # One server writes to a store, so that it knows the next number without asking.
        self._numbers = itertools.count(last + 1)

    def next_number(self) -> int:
        """For a step that is about to be recorded; those of a write that fails are left out."""
        return next(self._numbers)

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
            merged = step._replace(
                metrics=orjson.dumps(together).decode(), entry_id=self.next_number()
            )
            self._append(connection, merged)
            redraw(connection, self._database, step.model_id, step.seq_id)
            return merged

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
        table = ALL_STEPS
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
        table = ALL_STEPS
        query = sa.select(table.c.made, table.c.seq_id).where(
            table.c.model_id == model_id, table.c.made.is_not(None)
        )
        return dict(await self._database.all(lambda made, seq_id: (made, seq_id), query))

    async def last_entry(self) -> int:
        """The number of the newest entry of all."""

        def read() -> int:
            with self._database.connect() as connection:
                return self._last_entry(connection)

        return await self._database.in_thread(read)

    async def since(
        self, entry_id: int, owner: str, model_id: str | None, limit: int
    ) -> Sequence[StepRecord] | None:
        """What was recorded after an entry for an owner, or for one of their runs, in order; None
        when too much was recorded since, or some of it has left the log."""
        posted, logged, models = schema.steps, schema.operations, schema.models
        is_asked = models.c.owner == owner
        if model_id is not None:
            is_asked = sa.and_(is_asked, models.c.model_id == model_id)
        asked = sa.select(models.c.model_id).where(is_asked)
        # Fewer entries are new than a run has.
        news = sa.union_all(
            sa.select(posted).where(
                _IS_POSTED, posted.c.entry_id > entry_id, compared(posted.c.model_id).in_(asked)
            ),
            LOGGED.where(logged.c.entry_id > entry_id, compared(logged.c.model_id).in_(asked)),
        ).subquery()
        query = sa.select(news).order_by(news.c.entry_id).limit(limit)
        moved = sa.select(sa.func.max(models.c.trimmed_entry_id)).where(is_asked)

        def read() -> list[StepRecord] | None:
            with self._database.connect() as connection:
                if self._last_entry(connection) - entry_id > _MOST_LOOKED_AT:
                    return None
                steps = [StepRecord(**row._mapping) for row in connection.execute(query)]
                # Asked last: what was moved meanwhile counts.
                is_whole = (connection.execute(moved).scalar() or 0) <= entry_id
                return steps if is_whole else None

        return await self._database.in_thread(read)

    def _last_entry(self, connection: sa.Connection) -> int:
        """A run's last operation never leaves the log, so no later entry has been moved since."""
        posted, logged = schema.steps, schema.operations
        newest = (
            sa.select(sa.func.max(posted.c.entry_id)).where(_IS_POSTED),
            sa.select(sa.func.max(logged.c.entry_id)).where(logged.c.entry_id.is_not(None)),
        )
        found = [connection.execute(query).scalar() or 0 for query in newest]
        return max(self._moved, *found)
