"""Rows as tests of the stores write them."""

from __future__ import annotations

from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    ModelRecord,
    OperationRecord,
    SessionRecord,
    UsageRecord,
    WeightsRecord,
)

USAGE = UsageRecord(owner="o", hour=5, base_model="b", session_id="s", kind="training", count=7)
SESSION = SessionRecord(
    session_id="s", owner="o", created_at=1.5, last_seen_at=1.5, sdk_version="0.36.0", tags=["a"]
)


MODEL = ModelRecord(
    model_id="s:train:0",
    session_id="s",
    model_seq_id=0,
    owner="o",
    base_model="b",
    lora={"rank": 4},
    optimizer={"type": "adamw"},
    created_at=2.0,
    last_request_at=2.0,
)


def operation(seq_id: int, **fields: object) -> OperationRecord:
    values: dict[str, object] = {
        "request_id": f"r{seq_id}",
        "model_id": MODEL.model_id,
        "seq_id": seq_id,
        "owner": "o",
        "kind": "forward_backward",
        "content_type": "application/x-protobuf",
        "payload": b"payload",
        "payload_bytes": 7,
        "created_at": 3.0,
    }
    return OperationRecord(**(values | fields))  # type: ignore[arg-type]  # a test's shorthand


def weights(weights_id: str, kind: str = "training") -> WeightsRecord:
    return WeightsRecord(
        weights_id=weights_id,
        kind=kind,
        base_model="b",
        lora={"rank": 4},
        optimizer={"type": "adamw"},
        size_bytes=10,
        created_at=4.0,
    )


def checkpoint(name: str, weights_id: str, **fields: object) -> CheckpointRecord:
    values: dict[str, object] = {
        "model_id": MODEL.model_id,
        "checkpoint_id": f"weights/{name}",
        "owner": "o",
        "checkpoint_type": "training",
        "weights_id": weights_id,
        "size_bytes": 10,
        "created_at": 4.0,
    }
    return CheckpointRecord(**(values | fields))  # type: ignore[arg-type]  # a test's shorthand


AUDIT = AuditRecord(owner="o", at=5.0, area="checkpoints", event="e", details={"n": 1})
