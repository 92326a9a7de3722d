"""A session's operations as a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
import sqlalchemy as sa

from tests.contract.store_rows import operation
from tinsmith.server.store import schema
from tinsmith.server.store.database import Database, row_of
from tinsmith.server.store.log import PAGE_ROWS
from tinsmith.server.traces import session_trace

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, TestServer


async def test_a_sessions_operations_can_be_looked_at_as_a_trace(api: Api) -> None:
    session = await api.session()
    model = await api.create_model(session)
    await api.result(await api.send_pass(model, 1))
    export = (await api.get(f"/sessions/{session}/trace_export")).json()
    assert export["status"] == "ready"
    trace = (await api.http.get(export["url"])).json()
    spans = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert spans == ["create_model", "forward_backward"]
    forged = export["url"].replace("signature=", "signature=x")
    assert (await api.http.get(forged)).status_code == 403


async def test_a_long_log_is_read_a_part_at_a_time(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = server.service.store
    session = await server.api.session()
    model = await server.api.create_model(session)
    passes = [
        row_of(operation(seq_id, request_id=f"r{seq_id}", model_id=model))
        for seq_id in range(1, 10_000)
    ]
    await store.database.execute_many(sa.insert(schema.operations), passes)
    sizes: list[int] = []
    read_all = Database.all

    async def counted(*args: Any) -> Any:
        rows = await read_all(*args)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(Database, "all", counted)
    trace = orjson.loads(b"".join([piece async for piece in session_trace(store, session)]))
    numbers = [e["args"]["seq_id"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert numbers == list(range(10_000))
    assert max(sizes) <= PAGE_ROWS
