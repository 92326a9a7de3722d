"""A server's part in the lease, over a table that a test scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from tinsmith.server.metrics import Metrics
from tinsmith.server.replicas.lease import Lease, View
from tinsmith.server.replicas.replica import Replica, ReplicaConfig
from tinsmith.server.store.errors import StoreUnavailableError

SECONDS = 0.04
"""Of the lease: its holder renews it four times meanwhile."""


class ScriptedTable:
    """Always free for this server, unless it holds the lease."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_held = False
        self.is_away = False
        self.num_refused = 0
        self.taken_at = self.released_at = 0.0

    def take(self) -> int | None:
        self._check()
        self.taken_at = time.monotonic()
        self.epoch, self.is_held = self.epoch + 1, True
        return self.epoch

    def renew(self, epoch: int) -> bool:
        self._check()
        return self.is_held

    def release(self, epoch: int) -> None:
        self._check()
        self.released_at = time.monotonic()
        self.is_held = False

    def _check(self) -> None:
        if self.is_away:
            self.num_refused += 1
            raise StoreUnavailableError("the database is away")

    def make_tables(self) -> None: ...

    def store_id(self) -> None: ...

    def present(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def table() -> ScriptedTable:
    return ScriptedTable()


@pytest.fixture
async def lease(table: ScriptedTable) -> AsyncIterator[Lease]:
    lease = _lease(table, lambda: None, rest_seconds=0.2)
    await lease.start()
    yield lease
    table.is_away = False
    await lease.close()


def _lease(table: ScriptedTable, on_change: Callable[[], None], rest_seconds: float) -> Lease:
    look_seconds = SECONDS / 4
    return Lease(
        cast(Any, table), SECONDS, on_change, look_seconds=look_seconds, rest_seconds=rest_seconds
    )


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)


async def test_a_lease_that_is_to_be_given_back_is_when_the_database_is_there_again(
    table: ScriptedTable, lease: Lease
) -> None:
    """It was kept for ever by a server that could not take over."""
    table.is_away = True
    lease.rest()
    await _until(lambda: table.num_refused >= 2)
    assert lease.view.epoch == 1 and lease.view.trouble is not None
    table.is_away = False
    await _until(lambda: not table.is_held)
    await _until(lambda: lease.view == View())


async def test_who_gave_the_lease_back_leaves_it_to_others_for_a_while(
    table: ScriptedTable, lease: Lease
) -> None:
    """From then on: the database may have been away for longer than the while."""
    table.is_away = True
    lease.rest()
    await asyncio.sleep(0.25)
    table.is_away = False
    await _until(lambda: table.epoch == 2)
    assert table.taken_at - table.released_at >= 0.2


async def test_a_lease_that_is_being_given_back_is_not_taken_over_with(
    table: ScriptedTable,
) -> None:
    """The database was away when the server took over, and is back when it has tried again: what
    it began then had an epoch that was no longer its own, and nothing it wrote was taken."""
    epochs: list[int] = []

    async def lead(epoch: int) -> Any:
        epochs.append(epoch)
        if len(epochs) == 1:
            table.is_away = True
            raise StoreUnavailableError("the database is away")
        table.is_away = False
        await _until(lambda: not table.is_held or epoch > 1)
        return Service(), None

    def lease(on_change: Callable[[], None]) -> Lease:
        return _lease(table, on_change, rest_seconds=0.1)

    replica = Replica(lease, lead, Metrics(), ReplicaConfig(patience_seconds=5.0), lambda: None)
    take, table.take = table.take, lambda: None  # type: ignore[method-assign]
    await replica.start()
    table.take = take  # type: ignore[method-assign]
    try:
        await _until(lambda: table.num_refused >= 2)
        table.is_away = False
        await _until(lambda: table.epoch == 2 and replica.service is not None)
        assert epochs == [1, 2]
    finally:
        await replica.stop()


async def test_a_server_that_begins_takes_over_once_though_the_database_is_away_meanwhile(
    table: ScriptedTable,
) -> None:
    """It began a second service beside the first, with engines of its own and the same epoch, so
    that both could write."""
    epochs: list[int] = []
    kept: list[Lease] = []

    async def lead(epoch: int) -> Any:
        epochs.append(epoch)
        table.is_away = True
        await _until(lambda: kept[0].view.trouble is not None)
        table.is_away = False
        await _until(lambda: kept[0].view.trouble is None)
        return Service(), None

    def lease(on_change: Callable[[], None]) -> Lease:
        kept.append(_lease(table, on_change, rest_seconds=5.0))
        return kept[-1]

    replica = Replica(lease, lead, Metrics(), ReplicaConfig(patience_seconds=5.0), lambda: None)
    await replica.start()
    try:
        assert epochs == [1] and replica.service is not None
    finally:
        await replica.stop()


class Service:
    """One that has begun, and does nothing."""

    def begin_drain(self) -> None: ...

    async def stop(self) -> None: ...
