"""A store that is away: operations wait, and nothing that was counted or recorded is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.server.store.database import Database
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.log import Log

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def _train(api: Api, model: str, first: int, count: int) -> None:
    for index in range(count):
        await api.result(await api.send_pass(model, first + 2 * index))
        await api.result(await api.send_step(model, first + 2 * index + 1))


async def _expected(api: Api, count: int) -> float:
    model = await api.model()
    await _train(api, model, 1, count)
    return await api.loss(model, 2 * count + 1)


class Outage:
    """While it lasts, every read and write of a store fails, as when the database is away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.num_refused = 0
        for name in ("in_thread", "write"):
            monkeypatch.setattr(Database, name, self._refusing(getattr(Database, name)))

    def _refusing(self, call: Any) -> Any:
        async def called(database: Database, *arguments: Any) -> Any:
            if self.is_on:
                self.num_refused += 1
                raise StoreUnavailableError("the store cannot be used now: away")
            return await call(database, *arguments)

        return called


async def test_operations_wait_while_the_store_is_away(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are read back from the store, models rebuilt from it: neither gives up."""
    outage = Outage(monkeypatch)
    server = await start_server(max_queued_memory_bytes=0, fake_pass_seconds=0.05)
    api = server.api
    expected = await _expected(api, 4)
    model = await api.model()
    sent = []
    for number in range(4):
        sent.append(await api.send_pass(model, 1 + 2 * number))
        sent.append(await api.send_step(model, 2 + 2 * number))
    saved = await api.ok("/save_weights", {"model_id": model, "seq_id": 9, "path": "a"})
    sent.append(saved["request_id"])
    await api.result(sent[0])
    outage.is_on = True
    response = await api.post("/optim_step", {"model_id": model, "seq_id": 10, "adam_params": {}})
    assert response.status_code == 503 and "away" in response.json()["detail"]
    server.kill_engine()
    await asyncio.sleep(1.5)
    outage.is_on = False
    assert outage.num_refused > 2
    for request_id in sent:
        await api.result(request_id)
    assert await api.loss(model, 10) == expected


async def test_a_recording_that_only_seemed_to_fail_is_found_by_the_retry(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection lost in mid-commit: the row is there, and nobody had queued it."""
    api = server.api
    model = await api.model()
    record = Log.record

    async def lost(log: Log, *arguments: Any) -> Any:
        await record(log, *arguments)
        raise StoreUnavailableError("the connection was lost")

    monkeypatch.setattr(Log, "record", lost)
    with pytest.raises(AssertionError, match="connection was lost"):
        await api.send_pass(model, 1)
    body = {"model_id": model, "seq_id": 2, "adam_params": 3}
    assert (await api.post("/optim_step", body)).status_code == 503
    monkeypatch.setattr(Log, "record", record)
    async with asyncio.timeout(30):
        await api.result(await api.send_pass(model, 1))
        assert (await api.post("/optim_step", body)).status_code == 400
        assert await api.loss(model, 3) > 0


async def test_counted_tokens_are_not_lost_with_a_failed_write(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await server.api.model()
    await _train(server.api, model, 1, 1)
    outage = Outage(monkeypatch)
    outage.is_on = True
    with pytest.raises(StoreUnavailableError):
        await server.service.usage.flush()
    outage.is_on = False
    await server.service.usage.flush()
    hours = await server.service.store.account.list_usage("owner", 0, 10**9)
    assert [dataclasses.replace(u, hour=0).count for u in hours if u.kind == "training"] == [4]
