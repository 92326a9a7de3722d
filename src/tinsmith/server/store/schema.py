"""The tables, once for both databases: each is made of the fields of its record.

Moments are seconds since 1970 in double precision, because SQLite has no type for them and
comparisons are all we do.
"""

from __future__ import annotations

import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from tinsmith.server.store import records

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Types = dict[str, type[TypeEngine[Any]] | TypeEngine[Any]]

_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers its rows by a column of exactly this type."""

_TYPES: dict[type, type[TypeEngine[Any]]] = {
    str: Text,
    int: BigInteger,
    float: Double,
    bool: Boolean,
    bytes: LargeBinary,
    list: JSON,
    dict: JSON,
}


def _table(
    name: str,
    record: type,
    key: tuple[str, ...],
    *more: SchemaItem,
    types: Types | None = None,
    **options: Any,
) -> Table:
    """A table with a column for each field of a record; `types` are those the field's own type
    does not tell, `options` those of the table."""
    columns = [
        _column(field, hint, field in key, types or {})
        for field, hint in get_type_hints(record).items()
    ]
    return Table(name, metadata, *columns, *more, **options)


def _column(name: str, hint: Any, is_key: bool, given: Types) -> Column[Any]:
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(k for k in kinds if k is not type(None))
    plain = str if get_origin(kind) is Literal else get_origin(kind) or kind
    is_nullable = type(None) in kinds
    return Column(name, given.get(name, _TYPES[plain]), primary_key=is_key, nullable=is_nullable)


def _index_of_made() -> Index:
    """Few operations make something."""
    is_set = text("made IS NOT NULL")
    return Index(None, "model_id", "made", sqlite_where=is_set, postgresql_where=is_set)


secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

identity = _table("identity", records.IdentityRecord, ("store_id",))

leases = _table("leases", records.LeaseRecord, ("name",))

keys = _table(
    "keys",
    records.KeyRecord,
    ("key_id",),
    UniqueConstraint("key_hash"),
    types={"key_id": Integer},
)

sessions = _table(
    "sessions", records.SessionRecord, ("session_id",), Index(None, "owner", "created_at")
)

models = _table(
    "models",
    records.ModelRecord,
    ("model_id",),
    UniqueConstraint("session_id", "model_seq_id"),
    Index(None, "owner", "created_at"),
    Index(None, "snapshot_weights_id"),
    Index(None, "previous_snapshot_weights_id"),
)

operations = _table(
    "operations",
    records.OperationRecord,
    ("request_id",),
    # What its step has beside: see `observing/all_steps`. NULL until the operation has ended.
    Column("loss_fn", Text),
    Column("wait_seconds", Double),
    Column("run_seconds", Double),
    Column("metrics", Text),
    Column("made", Text),
    Column("entry_id", BigInteger),
    UniqueConstraint("model_id", "seq_id"),
    Index(None, "status", "finished_at"),
    # Few operations have weights, and each set of weights is looked up here every few seconds.
    Index(
        None,
        "weights_id",
        sqlite_where=text("weights_id IS NOT NULL"),
        postgresql_where=text("weights_id IS NOT NULL"),
    ),
    Index(
        None,
        "entry_id",
        sqlite_where=text("entry_id IS NOT NULL"),
        postgresql_where=text("entry_id IS NOT NULL"),
    ),
    _index_of_made(),
)

weights = _table("weights", records.WeightsRecord, ("weights_id",))

checkpoints = _table(
    "checkpoints",
    records.CheckpointRecord,
    ("model_id", "checkpoint_id"),
    Index(None, "weights_id"),
    Index(None, "owner", "created_at"),
)

samplers = _table(
    "samplers",
    records.SamplerRecord,
    ("sampler_id",),
    UniqueConstraint("session_id", "sampling_session_seq_id"),
    Index(None, "weights_id"),
    Index(None, "owner"),
    types={"num_clients": Integer},
)

custom_losses = _table(
    "custom_losses",
    records.CustomLossRecord,
    ("loss_id",),
    UniqueConstraint("session_id", "custom_loss_seq_id"),
    Index(None, "request_id", unique=True),
    Index(None, "owner", "used_at"),
)

audit = _table(
    "audit",
    records.AuditRecord,
    (),
    Column("entry_id", Integer, primary_key=True, autoincrement=True),
    Index(None, "owner", "at"),
)

usage = _table(
    "usage",
    records.UsageRecord,
    ("owner", "hour", "base_model", "session_id", "kind", "model_id"),
    types={"hour": Integer},
)

steps = _table(
    "steps",
    records.StepRecord,
    ("model_id", "source", "seq_id"),
    _index_of_made(),
    # Of operations, those that are still in the log are looked for in order, and there.
    Index(
        None,
        "entry_id",
        sqlite_where=text("source = 'posted'"),
        postgresql_where=text("source = 'posted'"),
    ),
    # A run's steps lie together: they come many at a time, and are read so.
    sqlite_with_rowid=False,
)

step_blocks = _table("step_blocks", records.BlockRecord, ("model_id", "source", "size", "block"))

step_marks = _table("step_marks", records.MarkRecord, ("model_id", "source"))

examples = _table(
    "examples",
    records.ExampleRecord,
    ("entry_id",),
    Index(None, "owner", "entry_id"),
    Index(None, "model_id", "seq_id"),
    types={"entry_id": _ROW_NUMBER},
)

sampler_stats = _table(
    "sampler_stats", records.SamplerStatsRecord, ("sampler_id",), Index(None, "model_id")
)

browser_sessions = _table("browser_sessions", records.BrowserSessionRecord, ("cookie_hash",))
