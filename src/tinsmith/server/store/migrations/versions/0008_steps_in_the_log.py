"""Steps are in the log while their operations are, and lie together by run afterwards. Those that
are there stay in their table. The smallest blocks of curves have 32 steps instead of 8."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_KEPT = (
    "model_id, source, seq_id, at, kind, status, loss_fn, num_tokens, wait_seconds, run_seconds, "
    "metrics, error, made, entry_id"
)
_IS_MADE = sa.text("made IS NOT NULL")
_IS_NUMBERED = sa.text("entry_id IS NOT NULL")
_IS_POSTED = sa.text("source = 'posted'")


def upgrade() -> None:
    for name, kind in (
        ("loss_fn", sa.Text()),
        ("wait_seconds", sa.Double()),
        ("run_seconds", sa.Double()),
        ("metrics", sa.Text()),
        ("made", sa.Text()),
        ("entry_id", sa.BigInteger()),
    ):
        op.add_column("operations", sa.Column(name, kind, nullable=True))
    _index("operations", ["entry_id"], _IS_NUMBERED)
    _index("operations", ["model_id", "made"], _IS_MADE)
    _lay_steps_together()
    op.add_column(
        "models",
        sa.Column("trimmed_entry_id", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.execute(
        "UPDATE models SET trimmed_entry_id = coalesce((SELECT max(entry_id) FROM steps "
        "WHERE steps.model_id = models.model_id AND source = 'operation'), 0)"
    )
    op.execute("DELETE FROM step_blocks WHERE size = 8")
    op.execute("UPDATE step_marks SET up_to = up_to / 32 * 32")


def _lay_steps_together() -> None:
    op.drop_index("ix_steps_model_id_made", "steps")
    op.rename_table("steps", "old_steps")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE old_steps RENAME CONSTRAINT pk_steps TO pk_old_steps")
    op.create_table(
        "steps",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("loss_fn", sa.Text(), nullable=True),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("wait_seconds", sa.Double(), nullable=False),
        sa.Column("run_seconds", sa.Double(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("made", sa.Text(), nullable=True),
        sa.Column("entry_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "source", "seq_id", name=op.f("pk_steps")),
        sqlite_with_rowid=False,
    )
    op.execute(
        f"INSERT INTO steps ({_KEPT}) SELECT {_KEPT} FROM old_steps "
        "ORDER BY model_id, source, seq_id"
    )
    op.drop_table("old_steps")
    _index("steps", ["model_id", "made"], _IS_MADE)
    _index("steps", ["entry_id"], _IS_POSTED)


def _index(table: str, columns: list[str], which: sa.TextClause) -> None:
    name = f"ix_{table}_{'_'.join(columns)}"
    op.create_index(name, table, columns, sqlite_where=which, postgresql_where=which)
