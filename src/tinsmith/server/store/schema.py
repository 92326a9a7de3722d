"""The tables, once for both databases.

Moments are seconds since the epoch in double precision, because SQLite has no type for them and
comparisons are all we do. The columns are the fields of the records in `base`.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", Integer, primary_key=True, autoincrement=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("note", Text, nullable=False),
    Column("key_hash", Text, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("expires_at", Double),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_seen_at", Double, nullable=False),
    Column("sdk_version", Text, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("project_id", Text),
    Column("display_name", Text),
    Column("state", Text, nullable=False),
    Column("finish_reason", Text),
    Column("finish_detail", Text),
    Index(None, "owner", "created_at"),
)

models = Table(
    "models",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("session_id", Text),
    Column("model_seq_id", BigInteger),
    Column("owner", Text, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("optimizer", JSON, nullable=False),
    Column("user_metadata", JSON),
    Column("project_id", Text),
    Column("created_at", Double, nullable=False),
    Column("last_request_at", Double, nullable=False),
    Column("snapshot_seq_id", BigInteger, nullable=False),
    Column("snapshot_weights_id", Text),
    Column("previous_snapshot_seq_id", BigInteger, nullable=False, server_default="-1"),
    Column("previous_snapshot_weights_id", Text),
    Column("is_corrupted", Boolean, nullable=False),
    Column("retired_at", Double),
    UniqueConstraint("session_id", "model_seq_id"),
    Index(None, "owner", "created_at"),
    Index(None, "snapshot_weights_id"),
    Index(None, "previous_snapshot_weights_id"),
)

operations = Table(
    "operations",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("model_id", Text, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("content_type", Text, nullable=False),
    Column("payload", LargeBinary),
    Column("payload_file", Text),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("status", Text, nullable=False),
    Column("finished_at", Double),
    Column("result_type", Text),
    Column("result", LargeBinary),
    Column("result_file", Text),
    Column("result_bytes", BigInteger, nullable=False),
    Column("retrieved_at", Double),
    Column("error", Text),
    Column("category", Text),
    Column("weights_id", Text),
    UniqueConstraint("model_id", "seq_id"),
    Index(None, "status", "finished_at"),
    # Few operations have weights, and each set of weights is looked up here every few seconds.
    Index(
        None,
        "weights_id",
        sqlite_where=text("weights_id IS NOT NULL"),
        postgresql_where=text("weights_id IS NOT NULL"),
    ),
)

weights = Table(
    "weights",
    metadata,
    Column("weights_id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("optimizer", JSON, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("checkpoint_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("checkpoint_type", Text, nullable=False),
    Column("weights_id", Text, nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("is_public", Boolean, nullable=False),
    Column("user_metadata", JSON),
    Column("expires_at", Double),
    Index(None, "owner", "created_at"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False),
    Column("sampling_session_seq_id", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("model_path", Text),
    Column("weights_id", Text, index=True),
    Column("num_clients", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("session_id", "sampling_session_seq_id"),
)

custom_losses = Table(
    "custom_losses",
    metadata,
    Column("loss_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False),
    Column("custom_loss_seq_id", BigInteger, nullable=False),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("definition", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("session_id", "custom_loss_seq_id"),
)

audit = Table(
    "audit",
    metadata,
    Column("entry_id", Integer, primary_key=True, autoincrement=True),
    Column("owner", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("area", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("details", JSON, nullable=False),
    Column("model_id", Text),
    Column("tinker_path", Text),
    Index(None, "owner", "at"),
)

usage = Table(
    "usage",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("hour", Integer, primary_key=True),
    Column("base_model", Text, primary_key=True),
    Column("session_id", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
)
