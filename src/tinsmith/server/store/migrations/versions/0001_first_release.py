"""The tables of the first release.

Migrations say columns again that others and the schema say: each stays as databases have met it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("entry_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("area", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("tinker_path", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_owner_at"), "audit", ["owner", "at"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("checkpoint_type", sa.Text(), nullable=False),
        sa.Column("weights_id", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("is_public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("model_id", "checkpoint_id", name=op.f("pk_checkpoints")),
    )
    op.create_index(
        op.f("ix_checkpoints_owner_created_at"),
        "checkpoints",
        ["owner", "created_at"],
        unique=False,
    )
    op.create_index(op.f("ix_checkpoints_weights_id"), "checkpoints", ["weights_id"], unique=False)
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("custom_loss_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("loss_id", name=op.f("pk_custom_losses")),
        sa.UniqueConstraint(
            "session_id",
            "custom_loss_seq_id",
            name=op.f("uq_custom_losses_session_id_custom_loss_seq_id"),
        ),
    )
    op.create_table(
        "keys",
        sa.Column("key_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_keys_key_hash")),
    )
    op.create_table(
        "models",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("optimizer", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_request_at", sa.Double(), nullable=False),
        sa.Column("snapshot_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_weights_id", sa.Text(), nullable=True),
        sa.Column("is_corrupted", sa.Boolean(), nullable=False),
        sa.Column("retired_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_models")),
        sa.UniqueConstraint(
            "session_id", "model_seq_id", name=op.f("uq_models_session_id_model_seq_id")
        ),
    )
    op.create_index(
        op.f("ix_models_owner_created_at"), "models", ["owner", "created_at"], unique=False
    )
    op.create_table(
        "operations",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("payload_file", sa.Text(), nullable=True),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("result_type", sa.Text(), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("result_file", sa.Text(), nullable=True),
        sa.Column("result_bytes", sa.BigInteger(), nullable=False),
        sa.Column("retrieved_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("category", sa.Text(), nullable=True),
        sa.Column("weights_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_operations")),
        sa.UniqueConstraint("model_id", "seq_id", name=op.f("uq_operations_model_id_seq_id")),
    )
    op.create_index(
        op.f("ix_operations_status_finished_at"),
        "operations",
        ["status", "finished_at"],
        unique=False,
    )
    op.create_table(
        "samplers",
        sa.Column("sampler_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("sampling_session_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=True),
        sa.Column("weights_id", sa.Text(), nullable=True),
        sa.Column("num_clients", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sampler_id", name=op.f("pk_samplers")),
        sa.UniqueConstraint(
            "session_id",
            "sampling_session_seq_id",
            name=op.f("uq_samplers_session_id_sampling_session_seq_id"),
        ),
    )
    op.create_index(op.f("ix_samplers_weights_id"), "samplers", ["weights_id"], unique=False)
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("sdk_version", sa.Text(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("finish_detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    op.create_index(
        op.f("ix_sessions_owner_created_at"), "sessions", ["owner", "created_at"], unique=False
    )
    op.create_table(
        "usage",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "owner", "hour", "base_model", "session_id", "kind", name=op.f("pk_usage")
        ),
    )
    op.create_table(
        "weights",
        sa.Column("weights_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("optimizer", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("weights_id", name=op.f("pk_weights")),
    )
