"""Rebuilding a model in an engine: its newest snapshot that can be read, then the log after it.

Used after a restart of the server, after the death of an engine, and when a model that was put on
disk is wanted again. Only operations that had taken effect are replayed, in order and without
recording anything; those still pending are in the model's queue and run in their turn.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from tinsmith.engine.base import Engine, Failure, Pass
from tinsmith.errors import TinkerError
from tinsmith.server.operations.execution import Executor
from tinsmith.server.operations.kinds import changed_model, operation_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation, PassKind, SingleKind, StepKind
from tinsmith.server.store.errors import StoreDamagedError
from tinsmith.server.store.records import ModelRecord, OperationRecord

logger = logging.getLogger(__name__)

_PASSES_AT_A_TIME = 32
_READ_AT_A_TIME = 64
"""Requests that are read together: one by one, the reading takes far longer than a small replay."""

_BYTES_AT_A_TIME = 4 * 1024 * 1024
"""Requests that are read, or replayed, together have so many bytes, or one more than that."""

TakeHistory = Callable[[LiveModel], Sequence[OperationRecord] | None]
"""What took effect after a model's snapshot, where that was read with the model and is still all
there is. It is handed out once."""


class RebuildError(TinkerError):
    """A model's state cannot be had again; the message says where its history breaks off."""


class Recovery:
    def __init__(self, executor: Executor, take_history: TakeHistory) -> None:
        self._executor = executor
        self._take_history = take_history

    async def rebuild(self, engine: Engine, model: LiveModel) -> None:
        """Bring the model's adapter in `engine` to where its log says it is."""
        await model.recorded()
        history = self._take_history(model)
        record = model.record if history is not None else await self._read_record(model)
        if (failure := await self._restore(engine, model)) is not None:
            if record.snapshot_weights_id == record.previous_snapshot_weights_id:
                _check(failure, "restore the snapshot of")
            logger.error("the newest snapshot of %s is damaged: %s", model.model_id, failure)
            record, history = await self._revert(model), None
            _check(await self._restore(engine, model), "restore the snapshots of")
        pages = self._changes(record) if history is None else _page(history)
        logger.info("rebuilding %s", model.model_id)
        try:
            num_operations = await self._replay(engine, model, pages)
        except StoreDamagedError as error:
            raise RebuildError(f"its log cannot be replayed: {error}") from error
        logger.info("rebuilt %s: %d operations replayed", model.model_id, num_operations)

    async def _restore(self, engine: Engine, model: LiveModel) -> Failure | None:
        """Begin anew, from the snapshot where there is one; why it cannot be used."""
        record = model.record
        await engine.unload_adapter(model.model_id)
        _check(await engine.create_adapter(model.model_id, record.base_model, model.lora), "create")
        if record.snapshot_weights_id is None:
            return None
        try:
            async with self._executor.weights.reading(record.snapshot_weights_id) as folder:
                restored = await engine.restore(model.model_id, folder, "exact")
        except StoreDamagedError as error:
            return Failure(str(error), "server")
        return restored if isinstance(restored, Failure) else None

    async def _revert(self, model: LiveModel) -> ModelRecord:
        """Go back to the previous snapshot; the log since then is still there."""
        await self._executor.store.models.revert_snapshot(model.model_id)
        model.is_changed = model.wants_snapshot = True
        return await self._read_record(model)

    async def _read_record(self, model: LiveModel) -> ModelRecord:
        record = await self._executor.store.models.get(model.model_id)
        assert record is not None
        model.record = record
        return record

    async def _changes(self, record: ModelRecord) -> AsyncIterator[Sequence[OperationRecord]]:
        """What changed the model after its snapshot, some of it at a time."""
        async for page in self._executor.store.log.pages(record.model_id, record.snapshot_seq_id):
            yield [each for each in page if changed_model(each)]

    async def _replay(
        self, engine: Engine, model: LiveModel, pages: AsyncIterator[Sequence[OperationRecord]]
    ) -> int:
        """How many operations there were."""
        passes: list[Pass] = []
        num_bytes = num_operations = 0
        async for operation in self._with_requests(pages):
            num_operations += 1
            if isinstance(operation.kind, PassKind):
                passes.append(await self._pass_of(operation.kind, model, operation))
                num_bytes += operation.record.payload_bytes
            is_full = len(passes) == _PASSES_AT_A_TIME or num_bytes >= _BYTES_AT_A_TIME
            if passes and (is_full or not operation.is_pass):
                await _run(engine, passes)
                passes, num_bytes = [], 0
            if isinstance(operation.kind, StepKind):
                step = await operation.kind.prepare(self._executor, model, operation)
                [result] = await engine.step([step])
                if operation.record.status == "done":
                    _check(result, f"replay step {operation.seq_id} of")
            elif isinstance(operation.kind, SingleKind):
                assert operation.kind.replay is not None, "it changes the model"
                failure = await operation.kind.replay(self._executor, engine, model, operation)
                _check(failure, f"replay operation {operation.seq_id} of")
        await _run(engine, passes)
        return num_operations

    async def _with_requests(
        self, pages: AsyncIterator[Sequence[OperationRecord]]
    ) -> AsyncIterator[Operation]:
        """The operations, with their requests where these are small; others are read when used.
        Whoever asks for the next one has no use for the last one's request any more."""
        async for page in pages:
            for part in _parts(page):
                absent = [each.request_id for each in part if each.payload is None]
                bodies = await self._executor.store.log.read_payloads(absent) if absent else {}
                for record in part:
                    operation = operation_of(record)
                    if (body := record.payload or bodies.get(record.request_id)) is not None:
                        await self._executor.decode(operation, body)
                    yield operation
                    operation.request = None

    async def _pass_of(self, kind: PassKind, model: LiveModel, operation: Operation) -> Pass:
        item = await kind.prepare(self._executor, model, operation)
        if isinstance(item, Failure):
            problem = f"operation {operation.seq_id} cannot be replayed: {item.message}"
            raise RebuildError(problem)
        return replace(item, is_replay=True)


async def _page(history: Sequence[OperationRecord]) -> AsyncIterator[Sequence[OperationRecord]]:
    yield history


def _parts(history: Sequence[OperationRecord]) -> Iterator[list[OperationRecord]]:
    """Operations whose requests are read together."""
    part: list[OperationRecord] = []
    num_bytes = 0
    for record in history:
        part.append(record)
        # What is in a file is read by itself.
        num_bytes += record.payload_bytes if record.payload_file is None else 0
        if len(part) == _READ_AT_A_TIME or num_bytes >= _BYTES_AT_A_TIME:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


async def _run(engine: Engine, passes: list[Pass]) -> None:
    if passes:
        async for finished in engine.run_passes(passes):
            _check(finished.result, f"replay pass {finished.index} of")


def _check(result: object, what: str) -> None:
    if isinstance(result, Failure):
        raise RebuildError(f"could not {what} the model: {result.message}")
