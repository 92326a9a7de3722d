"""What a start reads of the models that were in use, and how much of it at a time."""

from __future__ import annotations

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
from tinsmith.server.store.records import OperationRecord
from tinsmith.server.store.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    provide_tables(tmp_path / "store.db")
    store = Store(sqlite_url(tmp_path / "store.db"), tmp_path / "blobs")
    yield store
    await store.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations with their requests each read has brought."""
    found: list[int] = []
    read_all = Database.all

    async def counted(*args: Any) -> Any:
        rows = await read_all(*args)
        if args[1] is OperationRecord:
            found.append(sum(row.payload is not None for row in rows))
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
