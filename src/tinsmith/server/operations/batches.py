"""Work on operations: a batch of passes, a batch of steps, and one that runs by itself.

In a batch each owner's part stands for itself. A request that cannot be read, or a result that
cannot be written, ends or delays that operation, and those behind it of the same model; the
batch goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from tinsmith.engine.base import Engine, Failure, Pass, Step
from tinsmith.errors import EngineError, TinkerError
from tinsmith.server.edge.owners import working_for
from tinsmith.server.operations.codecs import pass_data
from tinsmith.server.operations.execution import DiskTroubleError
from tinsmith.server.operations.finishes import failed, pass_done, step_done
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation, PassKind, SingleKind, StepKind
from tinsmith.server.operations.recorded_pass import RecordedPass
from tinsmith.server.operations.runner import STORE_PAUSE_SECONDS, OperationsWork, Parts
from tinsmith.server.operations.shares import moved
from tinsmith.server.store.errors import StoreDamagedError, StoreUnavailableError
from tinsmith.server.store.records import Finish

logger = logging.getLogger(__name__)

T = TypeVar("T")

Prepare = Callable[[LiveModel, Operation], Awaitable[T | Failure]]
_Read = list[tuple[Operation, T | Failure | StoreUnavailableError]]

PATIENCE_SECONDS = 0.05
"""How long a batch waits for requests to be read when those of another owner are ready."""


class _Batch(OperationsWork):
    async def prepared(self, prepare: Prepare[T]) -> list[T]:
        """The engine's items for the operations, in order; those without one have left.

        Owners are read for side by side. One whose requests take long to read, where others are
        ready, is left out until they are read.
        """
        of_owner: dict[str, dict[Operation, LiveModel]] = {}
        for operation, model in self.unfinished.items():
            of_owner.setdefault(model.owner, {})[operation] = model
        reading: dict[asyncio.Task[_Read[T]], list[Operation]] = {}
        found: _Read[T] = []
        for owner, operations in of_owner.items():
            if all(map(_is_at_hand, operations)):
                found += await _read_all(owner, operations, prepare)
            else:
                task = asyncio.create_task(_read_all(owner, operations, prepare))
                reading[task] = list(operations)
        if reading:
            is_shared = bool(found) or len(reading) > 1
            done, _ = await asyncio.wait(reading, timeout=PATIENCE_SECONDS if is_shared else None)
            if not done and not found:  # nobody waits for another
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task, left_out in reading.items():
                if task in done:
                    found += task.result()
                else:
                    self._leave_out_while(task, left_out)
        items: dict[Operation, T] = {}
        for operation, item in found:
            if operation not in self.unfinished:
                continue
            if isinstance(item, StoreUnavailableError):
                self._set_aside(self.unfinished[operation], item)
            elif isinstance(item, Failure):
                self.end(operation, failed(operation, item))
            else:
                items[operation] = item
        return [items[operation] for operation in self.unfinished]

    def end_with(
        self, operation: Operation, result: T | Failure, done: Callable[[Operation, T], Finish]
    ) -> None:
        """An operation's part is done; a result that cannot be written is that operation's."""
        if isinstance(result, Failure):
            self.end(operation, failed(operation, result))
            return
        try:
            finish = done(operation, result)
        except Exception as error:
            self.end_broken(operation, error)
        else:
            self.end(operation, finish)

    def left_out(self, model: LiveModel, operation: Operation) -> None:
        """An operation has left the batch before it began."""

    def _set_aside(self, model: LiveModel, error: StoreUnavailableError) -> None:
        """Leave out a model whose requests cannot be read now, all of them: they run in order."""
        logger.warning("%s: %s; trying again", model.model_id, error)
        left_out = [operation for operation, other in self.unfinished.items() if other is model]
        for operation in left_out:
            operation.forget_uncounted()
        loop = asyncio.get_running_loop()
        self._leave_out(left_out, lambda back: loop.call_later(STORE_PAUSE_SECONDS, back, None))

    def _leave_out_while(self, task: asyncio.Task[_Read[T]], operations: list[Operation]) -> None:
        """Go on without an owner's part while it is read. No other of his passes begin meanwhile:
        one batch after the other would read what is his, and have it wait in memory, uncounted."""
        owner, reading = self.unfinished[operations[0]].owner, self.parts.reading
        reading[owner] += 1

        def is_read(_: object) -> None:
            reading[owner] -= 1
            if not reading[owner]:
                del reading[owner]

        task.add_done_callback(is_read)
        self._leave_out(operations, task.add_done_callback)

    def _leave_out(
        self, operations: list[Operation], when: Callable[[Callable[[object], None]], object]
    ) -> None:
        """Take operations out of the batch; they go back to their queues when `when` says so."""
        left_out = [(operation, self.unfinished.pop(operation)) for operation in operations]
        for operation, model in left_out:
            self.left_out(model, operation)

        def put_back(_: object) -> None:
            for operation, model in left_out:
                model.queue.put(operation)
            for model in dict.fromkeys(model for _, model in left_out):
                self.parts.free(model)

        when(put_back)


def _is_at_hand(operation: Operation) -> bool:
    """Whether nothing has to be read for it: neither its request nor an uploaded loss."""
    request = operation.request
    if isinstance(request, RecordedPass):
        return pass_data(request.request)[1] != "custom"
    return request is not None


async def _read_all(
    owner: str, operations: dict[Operation, LiveModel], prepare: Prepare[T]
) -> _Read[T]:
    """The items of one owner's operations, in order. What was read once is read no second time."""
    with working_for(owner):
        return [
            (operation, await _read(model, operation, prepare))
            for operation, model in operations.items()
        ]


async def _read(
    model: LiveModel, operation: Operation, prepare: Prepare[T]
) -> T | Failure | StoreUnavailableError:
    try:
        return await prepare(model, operation)
    except StoreUnavailableError as error:
        return error
    except StoreDamagedError as error:
        return Failure(f"the recorded request cannot be read: {error}", "server")
    except Exception as error:
        logger.exception("operation %s cannot run", operation.record.request_id)
        return Failure(f"the recorded request cannot be read: {error!r}", "server")


class PassBatch(_Batch):
    def __init__(
        self,
        parts: Parts,
        claims: list[tuple[LiveModel, Operation]],
        expected: dict[Operation, float],
    ) -> None:
        """`expected` are the seconds that each pass has been charged with."""
        super().__init__(parts, claims)
        self._expected = expected
        self.expected_seconds = sum(expected.values())
        self.num_tokens = sum(operation.num_tokens for _, operation in claims)
        self.began_at = time.monotonic()
        self.first_done_at: float | None = None
        """When the first of its models was free again."""

    @property
    def owners(self) -> set[str]:
        """Whose passes are not finished yet."""
        return {model.owner for model in self.unfinished.values()}

    async def run(self, engine: Engine, generation: int) -> None:
        self.put_back_absent(generation)
        items = await self.prepared(self._pass_of)
        running = list(self.unfinished)
        if not items:
            return
        async for finished in engine.run_passes(items):
            operation = running[finished.index]
            item = items[finished.index]
            self._charge(operation, finished.seconds, is_usual=item.custom_loss is None)
            done = partial(pass_done, item, self.parts.config.keep_examples)
            self.end_with(operation, finished.result, done)

    def left_out(self, model: LiveModel, operation: Operation) -> None:
        self.parts.shares.charge(model.owner, model.model_id, -self._expected[operation])

    async def _pass_of(self, model: LiveModel, operation: Operation) -> Pass | Failure:
        assert isinstance(operation.kind, PassKind)
        return await operation.kind.prepare(self.parts.executor, model, operation)

    def _charge(self, operation: Operation, seconds: float, *, is_usual: bool) -> None:
        """Count what the pass took in place of what was expected. What a token usually takes is
        learnt from losses of ours; an uploaded one may take any time."""
        model, shares = self.unfinished[operation], self.parts.shares
        shares.charge(model.owner, model.model_id, seconds - self._expected[operation])
        if is_usual:
            shares.measured(model.record.base_model, model.owner, operation.num_tokens, seconds)
        rate = seconds / max(1, operation.num_tokens)
        known = model.seconds_per_token
        model.seconds_per_token = rate if known is None else moved(known, rate)


class StepBatch(_Batch):
    async def run(self, engine: Engine, generation: int) -> None:
        self.put_back_absent(generation)
        steps = await self.prepared(self._step_of)
        running = list(self.unfinished)
        if not steps:
            return
        started = time.perf_counter()
        results = await engine.step(steps)
        seconds = time.perf_counter() - started
        self.parts.metrics.observe("step_seconds", seconds)
        for operation, result in zip(running, results, strict=True):
            model = self.unfinished[operation]
            self.parts.shares.charge(model.owner, model.model_id, seconds / len(steps))
            if isinstance(result, Failure):
                doubt(model, result.category)
                # The engine has dropped the gradient that made the step fail, and will again.
                is_seen = result.category == "user"
                self.end(operation, failed(operation, result, took_effect=is_seen))
            else:
                self.end_with(operation, result, step_done)

    async def _step_of(self, model: LiveModel, operation: Operation) -> Step | Failure:
        assert isinstance(operation.kind, StepKind)
        return await operation.kind.prepare(self.parts.executor, model, operation)


class Single(OperationsWork):
    """An operation that runs by itself."""

    def __init__(
        self,
        parts: Parts,
        model: LiveModel,
        operation: Operation,
        make_room: Callable[[Engine, LiveModel], Awaitable[None]],
    ) -> None:
        super().__init__(parts, [(model, operation)])
        self._model = model
        self._operation = operation
        self._make_room = make_room

    async def run(self, engine: Engine, generation: int) -> None:
        model, operation = self._model, self._operation
        assert isinstance(operation.kind, SingleKind)
        self.put_back_absent(generation)
        if not self.unfinished:
            return
        await model.recorded()
        if operation.seq_id == 0:
            model.held_generation = generation
        try:
            finish = await operation.kind.execute(self.parts.executor, engine, model, operation)
        except (StoreUnavailableError, DiskTroubleError):
            if operation.seq_id == 0:
                # It may have been made by now; it is made again.
                with contextlib.suppress(EngineError):
                    await engine.unload_adapter(model.model_id)
            raise
        if operation.seq_id > 0:
            if finish.status == "failed":
                doubt(model, finish.category)
        elif finish.status == "done":
            model.generation = generation
            await self._make_room(engine, model)
        else:
            problem = f"model {model.model_id} was not created: {finish.error}"
            model.failure = Failure(problem, "user")
        self.end(operation, finish)

    def waited(self, error: TinkerError) -> None:
        operation = self._operation
        operation.disk_troubles += isinstance(error, DiskTroubleError)
        patience = self.parts.config.disk_patience_seconds
        if operation.disk_troubles * STORE_PAUSE_SECONDS >= patience:
            self.end(operation, failed(operation, Failure(str(error), "server")))
        else:
            super().waited(error)


def doubt(model: LiveModel, category: str | None) -> None:
    """A failure of the engine's own may have left the model half changed: rebuild it."""
    if category == "server":
        model.generation = 0
