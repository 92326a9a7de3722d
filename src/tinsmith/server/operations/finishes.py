"""The end of an operation as a value: what is recorded of it, and what its client hears."""

from __future__ import annotations

import time

from tinsmith.engine.base import Failure, Pass
from tinsmith.server.console.observed import encode_metrics, observed
from tinsmith.server.console.pass_examples import examples_of
from tinsmith.server.futures import Outcome
from tinsmith.server.operations.operation import Operation
from tinsmith.server.store.records import (
    AuditRecord,
    CheckpointRecord,
    Finish,
    OperationStatus,
    SamplerRecord,
    StepRecord,
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
    metrics: dict[str, float] | None = None,
) -> Finish:
    now = time.time()
    made = checkpoint.checkpoint_id if checkpoint else sampler.sampler_id if sampler else None
    return Finish(
        request_id=operation.record.request_id,
        status="done",
        finished_at=now,
        result_type="json",
        result=json.encode(response),
        took_effect=True,
        weights=weights,
        checkpoint=checkpoint,
        sampler=sampler,
        audit=audit,
        used_weights_id=used_weights_id,
        step=_step(operation, "done", now, metrics=metrics, made=made),
    )


def pass_done(
    item: Pass, num_examples: int, operation: Operation, output: ForwardBackwardOutput
) -> Finish:
    """`num_examples` of its sequences, at most, are kept to be looked at."""
    now = time.time()
    metrics = observed(item, output)
    return Finish(
        request_id=operation.record.request_id,
        status="done",
        finished_at=now,
        result_type="output",
        result=proto.encode_output(output),
        took_effect=True,
        step=_step(operation, "done", now, metrics=metrics, loss_fn=item.loss_fn),
        examples=examples_of(item, operation.record, output, num_examples) if num_examples else (),
    )


def step_done(operation: Operation, metrics: dict[str, float]) -> Finish:
    return done(operation, OptimStepResponse(metrics=metrics), metrics=metrics)


def failed(operation: Operation, failure: Failure, *, took_effect: bool = False) -> Finish:
    """`took_effect` when the model is in another state for it all the same."""
    now = time.time()
    return Finish(
        request_id=operation.record.request_id,
        status="failed",
        finished_at=now,
        error=failure.message,
        category=failure.category,
        took_effect=took_effect,
        step=_step(operation, "failed", now, error=failure.message),
    )


def _step(
    operation: Operation,
    status: OperationStatus,
    now: float,
    *,
    metrics: dict[str, float] | None = None,
    loss_fn: str | None = None,
    error: str | None = None,
    made: str | None = None,
) -> StepRecord:
    """What stays of the operation. One that never started has waited to its end."""
    record = operation.record
    started_at = now if operation.started_at is None else operation.started_at
    return StepRecord(
        model_id=record.model_id,
        seq_id=record.seq_id,
        at=now,
        kind=record.kind,
        status=status,
        loss_fn=loss_fn,
        num_tokens=record.num_tokens,
        wait_seconds=max(0.0, started_at - record.created_at),
        run_seconds=max(0.0, now - started_at),
        metrics=encode_metrics(metrics) if metrics else "{}",
        error=error,
        made=made,
    )


def outcome_of(finish: Finish) -> Outcome:
    if finish.status == "failed":
        return Outcome(error=finish.error, category=finish.category or "unknown")
    result_type = "output" if finish.result_type == "output" else "json"
    return Outcome(result_type=result_type, body=finish.result or b"")  # type: ignore[arg-type]  # one of two literals
