"""The end of an operation as a value: what is recorded of it, and what its client hears."""

from __future__ import annotations

import time

from tinsmith.engine.base import Failure
from tinsmith.server.futures import Outcome
from tinsmith.server.operations.operation import Operation
from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    Finish,
    SamplerRecord,
    WeightsRecord,
)
from tinsmith.types import ForwardBackwardOutput, OptimStepResponse
from tinsmith.types.model import Model
from tinsmith.wire import json, proto


def done(
    operation: Operation,
    response: Model,
    *,
    weights: WeightsRecord | None = None,
    checkpoint: CheckpointRecord | None = None,
    sampler: SamplerRecord | None = None,
    audit: AuditRecord | None = None,
    used_weights_id: str | None = None,
) -> Finish:
    return Finish(
        request_id=operation.record.request_id,
        status="done",
        finished_at=time.time(),
        result_type="json",
        result=json.encode(response),
        took_effect=True,
        weights=weights,
        checkpoint=checkpoint,
        sampler=sampler,
        audit=audit,
        used_weights_id=used_weights_id,
    )


def pass_done(operation: Operation, output: ForwardBackwardOutput) -> Finish:
    return Finish(
        request_id=operation.record.request_id,
        status="done",
        finished_at=time.time(),
        result_type="output",
        result=proto.encode_output(output),
        took_effect=True,
    )


def step_done(operation: Operation, metrics: dict[str, float]) -> Finish:
    return done(operation, OptimStepResponse(metrics=metrics))


def failed(operation: Operation, failure: Failure, *, took_effect: bool = False) -> Finish:
    """`took_effect` when the model is in another state for it all the same."""
    return Finish(
        request_id=operation.record.request_id,
        status="failed",
        finished_at=time.time(),
        error=failure.message,
        category=failure.category,
        took_effect=took_effect,
    )


def outcome_of(finish: Finish) -> Outcome:
    if finish.status == "failed":
        return Outcome(error=finish.error, category=finish.category or "unknown")
    result_type = "output" if finish.result_type == "output" else "json"
    return Outcome(result_type=result_type, body=finish.result or b"")  # type: ignore[arg-type]  # one of two literals
