"""The log holds operations only, and says which took effect; a store has an identity; what was
deleted can be brought back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "identity",
        sa.Column("store_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("store_id", name=op.f("pk_identity")),
    )
    op.add_column("weights", sa.Column("deleted_checkpoint", sa.JSON(), nullable=True))
    op.add_column(
        "models",
        sa.Column("trimmed_seq_id", sa.BigInteger(), nullable=False, server_default="-1"),
    )
    op.create_index("ix_samplers_owner", "samplers", ["owner"])
    _move_losses_out_of_the_log()
    op.execute("DELETE FROM operations WHERE kind IN ('create_custom_loss', 'unload_model')")
    _say_what_took_effect()


def _say_what_took_effect() -> None:
    """Until now that was guessed from how an operation ended. A step that waited for a missing
    number in vain was a mistake of that guess: it never reached the engine."""
    op.add_column("operations", sa.Column("digest", sa.Text(), nullable=True))
    op.add_column(
        "operations",
        sa.Column("took_effect", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.add_column(
        "models", sa.Column("closed_seq_id", sa.BigInteger(), nullable=False, server_default="-1")
    )
    operations = sa.table(
        "operations",
        *(sa.column(name) for name in ("kind", "status", "category", "error", "took_effect")),
    )
    waited_in_vain = operations.c.error.like("waited % for operation %, which never arrived")
    dropped_its_gradient = sa.and_(
        operations.c.kind == "optim_step", operations.c.category == "user", ~waited_in_vain
    )
    op.execute(
        sa.update(operations)
        .where(sa.or_(operations.c.status == "done", dropped_its_gradient))
        .values(took_effect=True)
    )


def _move_losses_out_of_the_log() -> None:
    """An upload's request id moves from its operation to the loss itself."""
    with op.batch_alter_table("custom_losses") as losses:
        losses.add_column(sa.Column("request_id", sa.Text(), nullable=True))
    op.execute(
        "UPDATE custom_losses SET request_id = (SELECT request_id FROM operations WHERE "
        "operations.model_id = custom_losses.session_id || '\\:loss' AND "
        "operations.seq_id = custom_losses.custom_loss_seq_id)"
    )
    # Both were written together, so each loss has found its operation.
    with op.batch_alter_table("custom_losses") as losses:
        losses.alter_column("request_id", existing_type=sa.Text(), nullable=False)
    op.create_index("ix_custom_losses_request_id", "custom_losses", ["request_id"], unique=True)
