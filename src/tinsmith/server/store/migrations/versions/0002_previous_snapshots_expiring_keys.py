"""A model keeps the snapshot before the newest, in case that turns out damaged; keys may expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column(
        "models",
        sa.Column("previous_snapshot_seq_id", sa.BigInteger(), nullable=False, server_default="-1"),
    )
    op.add_column("models", sa.Column("previous_snapshot_weights_id", sa.Text(), nullable=True))
    op.add_column("keys", sa.Column("expires_at", sa.Double(), nullable=True))
    # Payloads up to the newest snapshot are gone already: there is nothing older to go back to.
    op.execute(
        "UPDATE models SET previous_snapshot_seq_id = snapshot_seq_id, "
        "previous_snapshot_weights_id = snapshot_weights_id"
    )
