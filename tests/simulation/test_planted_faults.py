"""Faults that are planted in a server are found by its simulated lives, within a few seeds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa

from tests.simulation.life import ANY_TROUBLE, PAUSES, Trouble, live
from tests.support.simulated_server import LoopWriter
from tinsmith import disk
from tinsmith.server.futures import Outcome
from tinsmith.server.operations import endings
from tinsmith.server.store.fence import Fence
from tinsmith.server.store.log import Log
from tinsmith.server.store.records import OperationRecord
from tinsmith.server.store.writer import no_fence

SEEDS = range(7, 19)

Plant = Callable[[], AbstractContextManager[Any]]


def _a_dropped_dedupe() -> AbstractContextManager[Any]:
    """A request that comes again is taken for a new one."""
    record = Log.record

    async def always_new(log: Log, operation: OperationRecord, *args: Any) -> Any:
        await record(log, operation, *args)
        return operation, True

    return patch.object(Log, "record", always_new)


@contextmanager
def _a_late_epoch_check() -> Iterator[None]:
    """The lease is looked at when a write is queued, and no more when it is carried out."""
    run_write, count = LoopWriter.run, LoopWriter._prepare

    async def check_and_queue(writer: LoopWriter, write: Callable[[sa.Connection], Any]) -> Any:
        with writer._connection.begin():
            writer._fence(writer._connection)
        return await run_write(writer, write)

    def prepare(writer: LoopWriter, connection: sa.Connection) -> None:
        with patch.object(writer, "_fence", no_fence):
            count(writer, connection)

    with (
        patch.object(LoopWriter, "run", check_and_queue),
        patch.object(LoopWriter, "_prepare", prepare),
    ):
        yield


def _a_replayed_answer() -> AbstractContextManager[Any]:
    """One end in fifty is told as the one before it was."""
    told: list[Outcome] = []
    outcome_of = endings.outcome_of

    def sometimes_the_last(finish: Any) -> Outcome:
        told.append(outcome_of(finish))
        return told[-2] if len(told) % 50 == 0 else told[-1]

    return patch.object(endings, "outcome_of", sometimes_the_last)


def _a_replay_of_one_too_many() -> AbstractContextManager[Any]:
    """A rebuilt model goes through the last operation of its snapshot once more."""
    pages = Log.pages

    def read_one_more(log: Log, model_id: str, after_seq_id: int) -> AsyncIterator[Any]:
        return pages(log, model_id, after_seq_id - 1)

    return patch.object(Log, "pages", read_one_more)


def _a_fence_left_open() -> AbstractContextManager[Any]:
    return patch.object(Fence, "check", lambda fence, connection: None)


def _a_folder_that_is_not_synced() -> AbstractContextManager[Any]:
    return patch.object(disk, "sync_folder", lambda folder: None)


@pytest.mark.parametrize(
    ("plant", "trouble"),
    [
        (_a_dropped_dedupe, ANY_TROUBLE),
        (_a_late_epoch_check, PAUSES),
        (_a_fence_left_open, PAUSES),
        (_a_replayed_answer, ANY_TROUBLE),
        (_a_replay_of_one_too_many, PAUSES),
        # Only a power cut at the right moment shows it, which takes ten lives.
        pytest.param(_a_folder_that_is_not_synced, ANY_TROUBLE, marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(plant: Plant, trouble: Trouble) -> None:
    with plant():
        found = any(isinstance(live(seed, trouble), str) for seed in SEEDS)
    assert found, f"not in {len(SEEDS)} lives"
