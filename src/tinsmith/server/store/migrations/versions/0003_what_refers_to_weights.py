"""What refers to weights is found by index: without them the log was read every few seconds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_index("ix_models_snapshot_weights_id", "models", ["snapshot_weights_id"])
    op.create_index(
        "ix_models_previous_snapshot_weights_id", "models", ["previous_snapshot_weights_id"]
    )
    is_set = sa.text("weights_id IS NOT NULL")
    op.create_index(
        "ix_operations_weights_id",
        "operations",
        ["weights_id"],
        sqlite_where=is_set,
        postgresql_where=is_set,
    )
