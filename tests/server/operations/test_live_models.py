"""What a start reads of the models that were in use, and how much of it at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.contract.store_rows import MODEL, SESSION, operation
from tests.support.databases import provide_tables
from tinsmith.server.futures import Promises
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of, sqlite_url
from tinsmith.server.store.records import Finish, OperationRecord
from tinsmith.server.store.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    provide_tables(tmp_path / "store.db")
    store = Store(sqlite_url(tmp_path / "store.db"), tmp_path / "blobs")
    yield store
    await store.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each read has brought."""
    return _count_rows(monkeypatch, lambda row: True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations with their requests each read has brought."""
    return _count_rows(monkeypatch, lambda row: row.payload is not None)


def _count_rows(
    monkeypatch: pytest.MonkeyPatch, counts: Callable[[OperationRecord], bool]
) -> list[int]:
    found: list[int] = []
    read_all = Database.all

    async def counted(*args: Any) -> Any:
        rows = await read_all(*args)
        if args[1] is OperationRecord:
            found.append(sum(map(counts, rows)))
        return rows

    monkeypatch.setattr(Database, "all", counted)
    return found


async def _add_model(store: Store, number: int, num_passes: int) -> str:
    model_id = f"s:train:{number}"
    model = dataclasses.replace(MODEL, model_id=model_id, model_seq_id=number)
    await store.log.record(
        operation(0, request_id=f"{number}.0", model_id=model_id, kind="create_model"), model
    )
    ended = {"status": "done", "took_effect": True, "model_id": model_id}
    passes = [
        row_of(operation(seq_id, request_id=f"{number}.{seq_id}", **ended))
        for seq_id in range(1, num_passes + 1)
    ]
    if passes:
        await store.database.execute_many(sa.insert(schema.operations), passes)
    return model_id


async def test_a_start_reads_a_few_thousand_operations_at_a_time(
    store: Store, reads: list[int]
) -> None:
    """Of 60,000 small passes, all at once, it took 300 MB."""
    await store.sessions.add(SESSION)
    sizes = [0, 1500, 1500, 5000, 0, 1500, 4095, 4096, 10]
    ids = [await _add_model(store, number, size) for number, size in enumerate(sizes)]
    models = LiveModels(store, Promises(1))
    await models.bring_back(0.0, 100)
    assert 0 < max(reads) <= 4096
    assert len(reads) < 2 * len(ids)
    for model_id, size in zip(ids, sizes, strict=True):
        model = models.find(model_id)
        assert model is not None
        history = models.take_history(model)
        assert history is not None
        assert [each.seq_id for each in history] == list(range(1, size + 1))
        assert [each.seq_id for each in model.queue.operations()] == [0]


async def test_models_with_short_logs_are_read_in_one_go(store: Store, reads: list[int]) -> None:
    await store.sessions.add(SESSION)
    ids = [await _add_model(store, number, 5) for number in range(100)]
    models = LiveModels(store, Promises(1))
    await models.bring_back(0.0, 100)
    assert len(models) == len(ids)
    assert reads == [600]


async def test_a_long_log_of_one_model_is_read_a_part_at_a_time(
    store: Store, rows: list[int]
) -> None:
    """At a start, when it is used again, and when it is rebuilt."""
    await store.sessions.add(SESSION)
    model_id = await _add_model(store, 0, 10_000)
    for read in ("at a start", "when it is used"):
        models = LiveModels(store, Promises(1))
        if read == "at a start":
            await models.bring_back(0.0, 100)
        model = await models.get(model_id)
        assert model is not None and model.is_changed
        assert model.queue.next_seq_id == 0 and model.queue.highest_seq_id == 10_000
        history = models.take_history(model)
        assert history is not None and len(history) == 10_000
        assert model.operations_since_snapshot == 10_000
    pages = [len(page) async for page in store.log.pages(model_id, -1)]
    assert pages == [4096, 4096, 10_001 - 2 * 4096]
    assert 0 < max(rows) <= 4096


async def test_a_history_too_large_to_be_kept_is_not(
    store: Store,
) -> None:
    await store.sessions.add(SESSION)
    model_id = await _add_model(store, 0, 5000)
    models = LiveModels(store, Promises(1), history_bytes=4_000_000)
    model = await models.get(model_id)
    assert model is not None and model.is_changed
    assert models.take_history(model) is None, "it is read when the model is rebuilt"


async def test_at_a_start_one_owners_requests_take_a_part_of_the_memory_for_them(
    store: Store,
) -> None:
    """What waits of the first models that are read would leave no room for anybody else's."""
    await store.sessions.add(SESSION)
    for number, owner in enumerate(["rude", "rude", "kind"]):
        model_id = f"s:train:{number}"
        model = dataclasses.replace(MODEL, model_id=model_id, model_seq_id=number, owner=owner)
        await store.log.record(operation(0, request_id=f"{number}.0", model_id=model_id), model)
        for seq_id in range(1, 6):
            body = {"payload": b"x" * 1000, "payload_bytes": 1000, "owner": owner}
            name = f"{number}.{seq_id}"
            await store.log.record(operation(seq_id, request_id=name, model_id=model_id, **body))
    models = LiveModels(store, Promises(1), history_bytes=8 * 3000)
    await models.bring_back(0.0, 100)
    assert 2000 <= models.backlog_of("rude").held_bytes <= 3000
    assert 2000 <= models.backlog_of("kind").held_bytes <= 3000


async def test_a_model_that_two_read_at_once_has_one_queue_and_counts_once(store: Store) -> None:
    await store.sessions.add(SESSION)
    model_id = await _add_model(store, 0, 0)
    await store.log.record(operation(2, request_id="0.2", model_id=model_id, kind="optim_step"))
    models = LiveModels(store, Promises(1))
    back, found = await asyncio.gather(models.bring_back(0.0, 100), models.get(model_id))
    assert found is models.find(model_id) and found is not None and back is None
    backlog = models.backlog_of(found.owner)
    assert backlog.num_operations == len(found.queue) == 2
    for waiting in found.queue.drop_all():
        models.ended(found, waiting)
    assert models.held_bytes == 0 and not models.backlog_of(found.owner).num_operations


async def test_what_was_recorded_unheard_is_not_carried_out_once_its_turn_is_over(
    store: Store,
) -> None:
    """Earlier releases left it waiting when they gave up the gap in which it belonged, and its
    commit may have come after that; the next start carried it out."""
    await store.sessions.add(SESSION)
    model_id = await _add_model(store, 0, 0)
    for seq_id in (1, 4):
        name = f"0.{seq_id}"
        await store.log.record(operation(seq_id, request_id=name, model_id=model_id))
    await store.log.finish([Finish(request_id="0.0", status="done", finished_at=4.0)])
    await store.models.update(model_id, {"closed_seq_id": 3})
    models = LiveModels(store, Promises(1))
    await models.bring_back(0.0, 100)
    model = models.find(model_id)
    assert model is not None
    assert [each.seq_id for each in model.queue.operations()] == [4]
    assert model.queue.next_seq_id == 4 and models.backlog_of(model.owner).num_operations == 1
    late = await store.log.get("0.1")
    assert late is not None and (late.status, late.category) == ("failed", "user")
    assert await store.log.models_with_pending() == [model_id]
