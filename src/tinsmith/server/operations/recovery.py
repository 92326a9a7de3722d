"""Rebuilding a model in an engine: its newest snapshot that can be read, then the log after it.

Used after a restart of the server, after the death of an engine, and when a model that was put on
disk is wanted again. Only operations that had taken effect are replayed, in order and without
recording anything; those still pending are in the model's queue and run in their turn.
"""

from __future__ import annotations

import logging

from tinsmith.engine.base import Engine, Failure, Pass, SnapshotKind
from tinsmith.errors import TinkerError
from tinsmith.server.operations.execution import Executor
from tinsmith.server.operations.kinds import LoadRequest, Operation
from tinsmith.server.operations.live_models import LiveModel
from tinsmith.server.store.errors import StoreDamagedError
from tinsmith.server.store.records import ModelRecord, OperationRecord

logger = logging.getLogger(__name__)

_PASSES_AT_A_TIME = 32


class RebuildError(TinkerError):
    """A model's state cannot be had again; the message says where its history breaks off."""


class Recovery:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def rebuild(self, engine: Engine, model: LiveModel) -> None:
        """Bring the model's adapter in `engine` to where its log says it is."""
        await model.recorded()
        record = await self._executor.store.models.get(model.model_id)
        assert record is not None
        model.record = record
        if (failure := await self._restore(engine, model)) is not None:
            if record.snapshot_weights_id == record.previous_snapshot_weights_id:
                _check(failure, "restore the snapshot of")
            logger.error("the newest snapshot of %s is damaged: %s", model.model_id, failure)
            record = await self._revert(model)
            _check(await self._restore(engine, model), "restore the snapshots of")
        log = await self._executor.store.log.read(model.model_id, record.snapshot_seq_id)
        replayed = [Operation(o) for o in log if _touched_the_model(o)]
        logger.info("rebuilding %s: %d operations to replay", model.model_id, len(replayed))
        try:
            await self._replay(engine, model, replayed)
        except StoreDamagedError as error:
            raise RebuildError(f"its log cannot be replayed: {error}") from error

    async def _restore(self, engine: Engine, model: LiveModel) -> Failure | None:
        """Begin anew, from the snapshot where there is one; why it cannot be used."""
        record = model.record
        await engine.unload_adapter(model.model_id)
        _check(await engine.create_adapter(model.model_id, record.base_model, model.lora), "create")
        if record.snapshot_weights_id is None:
            return None
        folder = self._executor.weights.folder(record.snapshot_weights_id)
        restored = await engine.restore(model.model_id, folder, "exact")
        return restored if isinstance(restored, Failure) else None

    async def _revert(self, model: LiveModel) -> ModelRecord:
        """Go back to the previous snapshot; the log since then is still there."""
        await self._executor.store.models.revert_snapshot(model.model_id)
        record = await self._executor.store.models.get(model.model_id)
        assert record is not None
        model.record = record
        model.is_changed = model.wants_snapshot = True
        return record

    async def _replay(self, engine: Engine, model: LiveModel, operations: list[Operation]) -> None:
        passes: list[Pass] = []
        for operation in operations:
            kind = operation.record.kind
            if kind == "forward_backward":
                item = await self._executor.pass_of(model, operation)
                if isinstance(item, Failure):
                    raise RebuildError(
                        f"operation {operation.seq_id} cannot be replayed: {item.message}"
                    )
                passes.append(item)
                if len(passes) == _PASSES_AT_A_TIME:
                    await _run(engine, passes)
                    passes = []
                continue
            await _run(engine, passes)
            passes = []
            if kind == "optim_step":
                [result] = await engine.step([await self._executor.step_of(model, operation)])
                if operation.record.status == "done":
                    _check(result, f"replay step {operation.seq_id} of")
            elif kind == "load_weights":
                await self._load(engine, model, operation)
        await _run(engine, passes)

    async def _load(self, engine: Engine, model: LiveModel, operation: Operation) -> None:
        request = await self._executor.request_of(operation)
        assert isinstance(request, LoadRequest) and operation.record.weights_id is not None
        kind: SnapshotKind = "training" if request.request.optimizer else "sampler"
        folder = self._executor.weights.folder(operation.record.weights_id)
        _check(
            await engine.restore(model.model_id, folder, kind), f"replay load {operation.seq_id} of"
        )


def _touched_the_model(operation: OperationRecord) -> bool:
    """Whether the engine is in another state for having carried out the operation.

    A step that failed for the user's gradient has dropped that gradient; it fails again in the
    replay, and drops it again. One that was given up never reached the weights.
    """
    if operation.kind == "optim_step":
        return operation.status == "done" or operation.category == "user"
    return operation.status == "done"


async def _run(engine: Engine, passes: list[Pass]) -> None:
    if passes:
        async for finished in engine.run_passes(passes):
            _check(finished.result, f"replay pass {finished.index} of")


def _check(result: object, what: str) -> None:
    if isinstance(result, Failure):
        raise RebuildError(f"could not {what} the model: {result.message}")
