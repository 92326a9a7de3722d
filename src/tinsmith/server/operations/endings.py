"""The end of operations: recorded in order, then told to those who wait.

An end is answered only when it is on disk, failures too: after a crash a request must not end in
another way than its client was told. The ends of one model are recorded in the order of its log,
so that what had taken effect is always a beginning of the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinsmith.engine.base import Failure
from tinsmith.server.futures import Promises
from tinsmith.server.metrics import Metrics
from tinsmith.server.operations.finishes import failed, outcome_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.snapshots import Snapshots
from tinsmith.server.store.errors import (
    LeaseLostError,
    OverQuotaError,
    StoreConflictError,
    StoreUnavailableError,
)
from tinsmith.server.store.records import Finish, ModelRecord, StepRecord
from tinsmith.server.store.store import Store
from tinsmith.server.tracing import Spans
from tinsmith.server.usage import Usage
from tinsmith.server.weights import WeightsFolders

if TYPE_CHECKING:
    from opentelemetry.context import Context

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_CONFLICT = "what this request made contradicts what is there already"

OnStep = Callable[[ModelRecord, int, StepRecord], None]
"""Hears of every end, and the number of its entry, when it is on disk."""


class Endings:
    def __init__(
        self,
        *,
        store: Store,
        weights: WeightsFolders,
        models: LiveModels,
        promises: Promises,
        snapshots: Snapshots,
        usage: Usage,
        metrics: Metrics,
        on_step: OnStep,
        spans: Spans,
    ) -> None:
        self._store = store
        self._weights = weights
        self._models = models
        self._promises = promises
        self._snapshots = snapshots
        self._usage = usage
        self._metrics = metrics
        self._on_step = on_step
        self._spans = spans
        self._causes: dict[str, Context] = {}
        """The traced requests whose ends are not on disk yet, by request id."""

    def end(self, model: LiveModel, operation: Operation, finish: Finish) -> None:
        """An operation is over: record that, then answer those who wait."""
        self._models.ended(model, operation)
        self._snapshots.note(model, operation, is_done=finish.status == "done")
        if finish.status == "done" and operation.is_pass:
            self._count_tokens(model, operation)
        seconds = time.time() - operation.record.created_at
        self._metrics.count("operations", kind=operation.record.kind, status=finish.status)
        self._metrics.observe("operation_seconds", seconds)
        logger.info(
            "%s %s %d of %s after %.3f s",
            finish.status,
            operation.record.kind,
            operation.seq_id,
            model.model_id,
            seconds,
            extra={**operation.record.log_fields, "status": finish.status, "seconds": seconds},
        )
        self._trace(operation, finish)
        model.finishes.append(finish)
        if model.committing is None:
            model.committing = asyncio.create_task(self._commit(model))

    def end_all(self, model: LiveModel, failure: Failure) -> None:
        """Fail everything that is queued for the model."""
        for operation in model.queue.drop_all():
            self.end(model, operation, failed(operation, failure))

    async def _commit(self, model: LiveModel) -> None:
        """Record a model's ends in order; those that come meanwhile go together next time."""
        size = len(model.finishes)
        while model.finishes:
            batch = model.finishes[:size]
            began_at = time.time()
            try:
                steps = await self._store.log.finish(batch)
            except StoreUnavailableError as error:
                # That another server has taken over is said once, not for every model.
                if not isinstance(error, LeaseLostError):
                    logger.warning("the ends of %s wait: %s", model.model_id, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            except Exception as error:
                # One of them contradicts what is there, or cannot be written at all: find it, and
                # let the others through.
                if len(batch) == 1:
                    model.finishes[0] = await self._unrecordable(model, batch[0], error)
                size = 1
                continue
            del model.finishes[: len(batch)]
            size = len(model.finishes)
            for finish in batch:
                cause = self._causes.pop(finish.request_id, None)
                self._spans.record(cause, "store commit", began_at)
                self._promises.resolve(finish.request_id, outcome_of(finish), finish.finished_at)
            for number, step in steps:
                self._tell(model.record, number, step)
        model.committing = None

    def _trace(self, operation: Operation, finish: Finish) -> None:
        if operation.cause is None:
            return
        record, now = operation.record, time.time()
        self._causes[record.request_id] = operation.cause
        about: dict[str, str | int] = {
            "model_id": record.model_id,
            "seq_id": record.seq_id,
            "num_tokens": record.num_tokens,
            "attempts": operation.attempts + 1,
        }
        started_at = operation.started_at or now
        self._spans.record(
            operation.cause, "queue wait", record.created_at, started_at, attributes=about
        )
        if operation.started_at is not None:
            self._spans.record(
                operation.cause,
                f"engine {record.kind}",
                started_at,
                now,
                error=finish.error,
                attributes=about,
            )

    def _tell(self, model: ModelRecord, number: int, step: StepRecord) -> None:
        """Listeners come second: their trouble must not keep later ends from the disk."""
        try:
            self._on_step(model, number, step)
        except Exception:
            logger.exception("nobody was told of operation %d of %s", step.seq_id, model.model_id)

    async def _unrecordable(self, model: LiveModel, finish: Finish, error: Exception) -> Finish:
        """A failed end in place of one that cannot be recorded. Where that is no conflict over a
        name or the owner's room, the model is rebuilt without the operation: its client hears that
        it failed."""
        if finish.weights is not None:
            await self._weights.discard(finish.weights.weights_id)
        if isinstance(error, OverQuotaError):
            problem, category = str(error), "user"
        elif isinstance(error, StoreConflictError):
            problem, category = f"{_CONFLICT}: {error}", "user"
        else:
            problem, category = "the result of this request could not be recorded", "server"
            model.generation = 0
        logger.error("the end of %s cannot be recorded", finish.request_id, exc_info=error)
        if finish.status == "failed":
            await asyncio.sleep(_RETRY_SECONDS)  # not even this one: do not try without pause
        step = finish.step
        return Finish(
            request_id=finish.request_id,
            status="failed",
            finished_at=finish.finished_at,
            error=problem,
            category=category,
            step=step and step._replace(status="failed", metrics="{}", error=problem, made=None),
        )

    def _count_tokens(self, model: LiveModel, operation: Operation) -> None:
        record = model.record
        self._usage.count(
            record.owner,
            record.base_model,
            record.session_id or "",
            "training",
            operation.num_tokens,
            record.model_id,
        )
        self._metrics.count("trained_tokens", operation.num_tokens)
