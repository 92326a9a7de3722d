"""The table of endpoints is what the server serves and what its description says."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

from tinsmith.server.edge.app import ROUTES
from tinsmith.server.edge.openapi import description
from tinsmith.wire import endpoints
from tinsmith.wire.endpoints import ENDPOINTS, NOTHING

if TYPE_CHECKING:
    from tests.support.in_process_server import Api


def test_every_endpoint_has_one_route() -> None:
    routed = Counter((route.row.method, route.row.full_path) for route in ROUTES)
    assert routed == Counter((row.method, row.full_path) for row in ENDPOINTS.values())
    assert set(routed.values()) == {1}


def test_the_description_says_what_each_endpoint_takes_and_gives() -> None:
    document = description("0")
    save = document["paths"]["/api/v1/save_weights"]["post"]
    assert save["summary"] and "SaveWeightsResponse" in save["description"]
    assert "finds the first by its sequence id" in save["description"]
    one = document["paths"]["/api/v1/forward_backward"]["post"]
    assert set(one["requestBody"]["content"]) == {"application/x-protobuf", "application/json"}
    trace = document["paths"]["/api/v1/traces/{session_id}.json"]["get"]
    assert trace["security"] == [{"signature": [], "expires": []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    runs = document["paths"]["/api/v1/training_runs"]["get"]
    assert [p["name"] for p in runs["parameters"]] == [
        "limit",
        "offset",
        "access_scope",
        "project_id",
    ]


async def test_an_endpoint_without_an_answer_says_204(api: Api) -> None:
    session = await api.session()
    row = endpoints.FINISH_SESSION.at(session_id=session)
    assert row.response is NOTHING
    response = await api.post(row.path, {"reason": {"type": "success"}})
    assert (response.status_code, response.content) == (204, b"")


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
