"""The table of endpoints is what the server serves and what its description says."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tinsmith.server.edge.app import ROUTES
from tinsmith.server.edge.openapi import description
from tinsmith.wire import endpoints
from tinsmith.wire.endpoints import ENDPOINTS, NOTHING

if TYPE_CHECKING:
    from tests.server.conftest import Api


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
