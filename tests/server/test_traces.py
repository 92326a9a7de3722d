"""A session's operations as a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.in_process_server import Api


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
