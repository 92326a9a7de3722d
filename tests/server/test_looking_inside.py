"""What the server says about itself: its API, its log, its traces."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

from tinsmith.server.logs import JsonFormatter

if TYPE_CHECKING:
    import pytest

    from tests.server.conftest import Api, TestServer

PROTOCOL = [
    "POST /client/config",
    "POST /client/dynamic_config",
    "POST /auth/token",
    "POST /create_session",
    "POST /session_heartbeat",
    "POST /sessions/{}/finish",
    "GET /get_server_capabilities",
    "GET /healthz",
    "POST /create_model",
    "POST /get_info",
    "POST /forward_backward",
    "POST /optim_step",
    "POST /save_weights",
    "POST /load_weights",
    "POST /save_weights_for_sampler",
    "POST /save_weights_external",
    "POST /create_custom_loss",
    "POST /create_sampling_session",
    "POST /join_sampling_session",
    "POST /asample",
    "POST /retrieve_future",
    "POST /retrieve_futures",
    "POST /cancel_future",
    "GET /samplers/{}",
    "POST /weights_info",
    "POST /copy_weights",
    "GET /training_runs",
    "GET /training_runs/{}",
    "GET /training_runs/{}/checkpoints",
    "DELETE /training_runs/{}/checkpoints/{}/{}",
    "POST /training_runs/{}/checkpoints/{}/{}/publish",
    "DELETE /training_runs/{}/checkpoints/{}/{}/publish",
    "PUT /training_runs/{}/checkpoints/{}/{}/ttl",
    "GET /training_runs/{}/checkpoints/{}/{}/external_weights_urls",
    "GET /checkpoints",
    "GET /sessions",
    "GET /sessions/{}",
    "POST /sessions/search",
    "PUT /sessions/{}/project",
    "GET /sessions/{}/trace_export",
    "GET /audit",
    "GET /billing/usage/events",
    "GET /billing/usage/checkpoints/current",
    "GET /auth/apikey/me",
    "DELETE /auth/apikey/me",
    "POST /telemetry",
]


async def test_every_endpoint_of_the_protocol_is_served_and_described(api: Api) -> None:
    """S2: the description is generated from the routes and the types."""
    document = (await api.http.get("/openapi.json")).json()
    served = {
        f"{method.upper()} {re.sub(r'{[^}]*}', '{}', path).removeprefix('/api/v1')}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert len(PROTOCOL) == 46
    assert set(PROTOCOL) <= served
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= schemas.keys()
    assert '"#/$defs/' not in json.dumps(document)


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


async def test_log_lines_name_the_request_and_the_model(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = await server.api.model()
    request_id = await server.api.send_pass(model, 1)
    await server.api.result(request_id)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    ended = [x for x in lines if x.get("request_id") == request_id and x.get("status") == "done"]
    assert ended[0]["model_id"] == model and ended[0]["kind"] == "forward_backward"
    assert ended[0]["seconds"] >= 0
