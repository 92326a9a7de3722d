"""Running work in the engine, guarded: what can go wrong is dealt with here, for all work alike.

When the engine dies, it is reported, and the work puts its operations back: the models are rebuilt
in the next engine. While the store or the disk cannot be used, the work waits and puts them
back. Any other error is a fault of ours: it is logged, and ends what it hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tinsmith.engine.base import Engine, Failure
from tinsmith.errors import EngineError, TinkerError
from tinsmith.server.config import ServerConfig
from tinsmith.server.edge.owners import working_for
from tinsmith.server.engines.supervisor import EngineSupervisor
from tinsmith.server.metrics import Metrics
from tinsmith.server.operations.endings import Endings
from tinsmith.server.operations.execution import DiskTroubleError, Executor
from tinsmith.server.operations.finishes import failed
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.shares import Shares
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.records import Finish

logger = logging.getLogger(__name__)

STORE_PAUSE_SECONDS = 1.0
"""How long work waits before it asks a store again that could not be used."""

Free = Callable[[LiveModel], None]
"""Called when nothing of a model is under way any more."""


class Work(Protocol):
    """Something to be done in the engine for one model or several."""

    @property
    def models(self) -> list[LiveModel]: ...

    async def run(self, engine: Engine, generation: int) -> None: ...

    def engine_died(self, error: EngineError) -> None:
        """What is not finished may be tried in the next engine."""
        ...

    def waited(self, error: TinkerError) -> None:
        """A while has passed since the store or the disk could not be used."""
        ...

    def broke(self, error: Exception) -> None: ...

    def close(self) -> None:
        """Free the models that are not free yet."""
        ...


async def run_guarded(work: Work, engines: EngineSupervisor, *, is_alone: bool = False) -> None:
    async with engines.exclusive() if is_alone else contextlib.nullcontext():
        try:
            engine, generation = await engines.get()
        except EngineError as error:
            # Its slot is lost: the models go on in another.
            work.waited(error)
            work.close()
            return
        try:
            with working_for(_owner_of(work)):
                await work.run(engine, generation)
        except EngineError as error:
            engines.report(generation, error)
            work.engine_died(error)
        except (StoreUnavailableError, DiskTroubleError) as error:
            logger.warning("%s; trying again in %g s", error, STORE_PAUSE_SECONDS)
            await asyncio.sleep(STORE_PAUSE_SECONDS)
            work.waited(error)
        except Exception as error:
            work.broke(error)
        finally:
            work.close()


def _owner_of(work: Work) -> str:
    """Whose work it is; "" where several have a part in it."""
    owners = {model.owner for model in work.models}
    return owners.pop() if len(owners) == 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What work on operations needs."""

    executor: Executor
    endings: Endings
    shares: Shares
    metrics: Metrics
    config: ServerConfig
    free: Free
    reading: Counter[str]
    """How many parts of batches each owner has that went on without them: what they need is still
    being read."""


class OperationsWork:
    """Operations that were taken from their queues, until each has ended or gone back.

    A model is free as soon as the last of its operations has left: its next one need not wait
    for what others have in the same work.
    """

    def __init__(self, parts: Parts, claims: list[tuple[LiveModel, Operation]]) -> None:
        self.parts = parts
        self.unfinished = {operation: model for model, operation in claims}
        self.models = list(dict.fromkeys(model for model, _ in claims))

    def end(self, operation: Operation, finish: Finish) -> None:
        model = self.unfinished[operation]
        self.parts.endings.end(model, operation, finish)
        self._leave(operation)

    def put_back(self, operation: Operation) -> None:
        operation.forget_uncounted()
        self.unfinished[operation].queue.put(operation)
        self._leave(operation)

    def put_back_absent(self, generation: int) -> None:
        """Put back operations on models that this engine does not hold: the last one died."""
        for operation, model in list(self.unfinished.items()):
            if operation.seq_id > 0 and model.generation != generation:
                self.put_back(operation)

    def engine_died(self, error: EngineError) -> None:
        limit = self.parts.config.engine_attempts
        for operation in list(self.unfinished):
            operation.attempts += 1
            if operation.attempts < limit:
                self.put_back(operation)
            else:
                times = f"the engine died {operation.attempts} times while this was under way"
                self.end(operation, failed(operation, Failure(f"{times}: {error}", "server")))

    def waited(self, error: TinkerError) -> None:
        for operation in list(self.unfinished):
            self.put_back(operation)

    def broke(self, error: Exception) -> None:
        for operation in list(self.unfinished):
            self.end_broken(operation, error)

    def end_broken(self, operation: Operation, error: Exception) -> None:
        """A fault of ours ended it; what the engine has done of it is in doubt."""
        self.unfinished[operation].generation = 0
        logger.error("operation %s failed", operation.record.request_id, exc_info=error)
        problem = f"an internal error ended this request ({type(error).__name__}: {error})"
        self.end(operation, failed(operation, Failure(problem, "server")))

    def close(self) -> None:
        for operation in list(self.unfinished):
            self._leave(operation)

    def _leave(self, operation: Operation) -> None:
        model = self.unfinished.pop(operation)
        if model not in self.unfinished.values():
            self.parts.free(model)
