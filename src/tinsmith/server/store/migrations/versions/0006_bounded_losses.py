"""How large an uploaded loss is, and when it was last used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_LAST_THAT_MAY_USE_IT = (
    "SELECT max(created_at) FROM operations WHERE operations.owner = custom_losses.owner "
    "AND (payload IS NOT NULL OR payload_file IS NOT NULL)"
)


def upgrade() -> None:
    """Which passes used a loss is not known: those that may run again may have."""
    op.add_column(
        "custom_losses",
        sa.Column("num_bytes", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.add_column(
        "custom_losses", sa.Column("used_at", sa.Double(), nullable=False, server_default="0")
    )
    op.execute(
        "UPDATE custom_losses SET num_bytes = length(CAST(definition AS TEXT)), "
        f"used_at = coalesce(({_LAST_THAT_MAY_USE_IT}), 0)"
    )
    op.execute("UPDATE custom_losses SET used_at = created_at WHERE used_at < created_at")
    op.create_index("ix_custom_losses_owner_used_at", "custom_losses", ["owner", "used_at"])
