"""An operation on its way through the server, and the kind that says how it travels.

A kind is a row of the table in `kinds`; the three classes are the three ways to be scheduled.
Nothing here knows which kinds there are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinsmith.server.operations.codecs import Codec
from tinsmith.server.store.records import OperationRecord

if TYPE_CHECKING:
    # What carries out an operation is below the table, and so above this.
    from opentelemetry.context import Context

    from tinsmith.engine.base import Engine, Failure, Pass, Step
    from tinsmith.server.operations.execution import Executor
    from tinsmith.server.operations.live_model import LiveModel
    from tinsmith.server.store.records import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    codec: Codec
    """Reads its recorded requests, and tells a repeated request from another."""

    changes_model: bool = False
    """Whether the model's state is another one afterwards: it is replayed when the model is
    rebuilt, and makes a snapshot due sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind(Kind):
    """Passes of many models run together, each answered when its own part is done."""

    prepare: Callable[[Executor, LiveModel, Operation], Awaitable[Pass | Failure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind(Kind):
    """Steps of the models that are ready run together."""

    prepare: Callable[[Executor, LiveModel, Operation], Awaitable[Step]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleKind(Kind):
    """Runs by itself, when the ends of all operations before it are in the store: it reads what
    they wrote there."""

    execute: Callable[[Executor, Engine, LiveModel, Operation], Awaitable[Finish]]
    replay: Callable[[Executor, Engine, LiveModel, Operation], Awaitable[Failure | None]] | None = (
        None
    )
    """Given where the kind changes the model."""


@dataclass(slots=True, eq=False)
class Operation:
    record: OperationRecord
    kind: Kind
    request: Any = None  # of the type that the kind's codec decodes
    """The decoded request; None while it lies in the store only."""
    held_bytes: int = 0
    """What its request counts among those kept in memory; 0 while it lies in the store only."""
    attempts: int = 0
    """How often the engine died while this was under way."""
    disk_troubles: int = 0
    """How often its files could not be written."""
    started_at: float | None = None
    """When it was last taken from its queue."""
    cause: Context | None = None
    """The traced request that brought it; lost in a restart."""

    def forget_uncounted(self) -> None:
        """Before it waits again: what was decoded for its turn counts nowhere."""
        if not self.held_bytes or self.record.payload is not None:
            self.request = None

    @property
    def seq_id(self) -> int:
        return self.record.seq_id

    @property
    def is_pass(self) -> bool:
        return isinstance(self.kind, PassKind)

    @property
    def is_step(self) -> bool:
        return isinstance(self.kind, StepKind)

    @property
    def num_tokens(self) -> int:
        return self.record.num_tokens

    @property
    def num_bytes(self) -> int:
        """Of its request, as it was recorded."""
        return self.record.payload_bytes
