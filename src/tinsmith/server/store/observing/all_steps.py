"""Where steps are: an operation's in its entry of the log, and in a table of their own afterwards.

The end of an operation writes its entry in the log in any case, so a step costs a few bytes more
there, and the log's own index finds it. When the log is trimmed, steps move to the table `steps`,
many of a run at once. Metrics that clients post have no operation, and are there from the start.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith.server.store import schema

LOGGED_COLUMNS = ("loss_fn", "wait_seconds", "run_seconds", "metrics")
"""Of a step, what its operation's entry in the log has for it alone; beside the number, and what a
few have made."""

_LOG = schema.operations

LOGGED = sa.select(
    _LOG.c.model_id,
    _LOG.c.seq_id,
    _LOG.c.finished_at.label("at"),
    _LOG.c.kind,
    # Not a bare word: SQLite would not look at both places by their indexes.
    sa.cast(sa.literal_column("'operation'"), sa.Text).label("source"),
    _LOG.c.status,
    _LOG.c.loss_fn,
    _LOG.c.num_tokens,
    _LOG.c.wait_seconds,
    _LOG.c.run_seconds,
    _LOG.c.metrics,
    _LOG.c.error,
    _LOG.c.made,
    _LOG.c.entry_id,
).where(_LOG.c.entry_id.is_not(None))
"""The steps that are in the log, with the columns of `steps`."""

ALL_STEPS = sa.union_all(sa.select(schema.steps), LOGGED).subquery("all_steps")
"""Both. One statement sees each step once, whatever is moved meanwhile."""


def move_steps(connection: sa.Connection, model_id: str, first: int, last: int) -> None:
    """Operations of a run are about to leave the log: keep their steps."""
    steps, models = schema.steps, schema.models
    leaving = LOGGED.where(_LOG.c.model_id == model_id, _LOG.c.seq_id.between(first, last))
    in_order = leaving.order_by(_LOG.c.seq_id)
    connection.execute(sa.insert(steps).from_select([column.name for column in steps.c], in_order))
    newest = connection.execute(
        sa.select(sa.func.max(steps.c.entry_id)).where(
            steps.c.model_id == model_id,
            steps.c.source == "operation",
            steps.c.seq_id.between(first, last),
        )
    ).scalar()
    is_later = sa.and_(models.c.model_id == model_id, models.c.trimmed_entry_id < newest)
    connection.execute(sa.update(models).where(is_later).values(trimmed_entry_id=newest))


def compared(column: sa.Column[str]) -> sa.ColumnElement[str]:
    """A column that rows are chosen by, and not looked up by: another index has fewer of them."""
    return sa.func.coalesce(column, "")
