"""What is kept of runs to be looked at: steps, blocks of them, examples, samplers. Browsers that
were let in. Usage by run. How many commits a store has seen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _create_steps()
    _create_samples()
    op.create_table(
        "browser_sessions",
        sa.Column("cookie_hash", sa.Text(), nullable=False),
        sa.Column("key_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("cookie_hash", name=op.f("pk_browser_sessions")),
    )
    _count_usage_by_run()
    _keep_what_the_log_still_knows()
    op.add_column(
        "identity", sa.Column("position", sa.BigInteger(), nullable=False, server_default="0")
    )


def _create_steps() -> None:
    op.create_table(
        "steps",
        sa.Column("entry_id", _ROW_NUMBER, nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("loss_fn", sa.Text(), nullable=True),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("weight_sum", sa.Double(), nullable=True),
        sa.Column("wait_seconds", sa.Double(), nullable=False),
        sa.Column("run_seconds", sa.Double(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("made", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_steps")),
        sa.UniqueConstraint(
            "model_id", "source", "seq_id", name=op.f("uq_steps_model_id_source_seq_id")
        ),
    )
    is_set = sa.text("made IS NOT NULL")
    op.create_index(
        "ix_steps_model_id_made",
        "steps",
        ["model_id", "made"],
        sqlite_where=is_set,
        postgresql_where=is_set,
    )
    op.create_table(
        "step_blocks",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("block", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "source", "size", "block", name=op.f("pk_step_blocks")),
    )
    op.create_table(
        "step_marks",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("up_to", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "source", name=op.f("pk_step_marks")),
    )


def _create_samples() -> None:
    op.create_table(
        "examples",
        sa.Column("entry_id", _ROW_NUMBER, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_examples")),
    )
    op.create_index("ix_examples_owner_entry_id", "examples", ["owner", "entry_id"])
    op.create_index("ix_examples_model_id_seq_id", "examples", ["model_id", "seq_id"])
    op.create_table(
        "sampler_stats",
        sa.Column("sampler_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in (
                "num_requests",
                "num_sequences",
                "prompt_tokens",
                "sampled_tokens",
                "longest_tokens",
            )
        ),
        sa.Column("logprob_sum", sa.Double(), nullable=False),
        sa.Column("num_stopped", sa.BigInteger(), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sampler_id", name=op.f("pk_sampler_stats")),
    )
    op.create_index("ix_sampler_stats_model_id", "sampler_stats", ["model_id"])
    op.add_column("samplers", sa.Column("model_id", sa.Text(), nullable=True))


def _count_usage_by_run() -> None:
    """The run joins the key; what was counted before belongs to none."""
    columns = ("owner", "hour", "base_model", "session_id", "kind", "count")
    op.rename_table("usage", "old_usage")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE old_usage RENAME CONSTRAINT pk_usage TO pk_old_usage")
    key = ("owner", "hour", "base_model", "session_id", "kind", "model_id")
    op.create_table(
        "usage",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_usage")),
    )
    names = ", ".join(columns)
    op.execute(f"INSERT INTO usage ({names}, model_id) SELECT {names}, '' FROM old_usage")
    op.drop_table("old_usage")


def _keep_what_the_log_still_knows() -> None:
    """Operations that ended before: when and how, though not with which numbers."""
    op.execute(
        "INSERT INTO steps (entry_id, model_id, source, seq_id, at, kind, status, num_tokens, "
        "wait_seconds, run_seconds, metrics, error) "
        "SELECT row_number() OVER (ORDER BY finished_at, model_id, seq_id), model_id, "
        "'operation', seq_id, finished_at, kind, status, num_tokens, finished_at - created_at, "
        "0.0, '{}', error FROM operations WHERE status <> 'pending' AND kind <> 'refused'"
    )
