"""Whether the server can serve, and what it says to whom when it cannot."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import httpx

from tinsmith.engine.base import Capabilities, RefusedModel
from tinsmith.engine.fake import FakeEngine

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer

REFUSED = RefusedModel(name="some/model", reason="its attention is of a kind that is not known")


class OneRefused(FakeEngine):
    async def capabilities(self) -> Capabilities:
        return dataclasses.replace(await super().capabilities(), refused=(REFUSED,))


class AllRefused(FakeEngine):
    async def capabilities(self) -> Capabilities:
        return dataclasses.replace(await super().capabilities(), models=(), refused=(REFUSED,))


async def _ready(api: Api, **headers: str) -> tuple[int, Any]:
    response = await api.http.get("/readyz", headers=headers)
    return response.status_code, response.json()


async def test_strangers_do_not_hear_what_the_engine_said_last(start_server: StartServer) -> None:
    server = await start_server()
    server.engines[-1].die("the prompt of somebody was: secret")
    await server.until(lambda: not server.service.engines.is_up)
    for headers in ({}, {"x-api-key": "tml-wrong"}):
        status, said = await _ready(server.api, **headers)
        assert status == 503
        assert said == {"status": "not ready", "detail": "the engine is restarting"}


async def test_who_has_a_key_hears_why_the_engine_is_down(start_server: StartServer) -> None:
    server = await start_server(broken="no such device")
    await server.until(lambda: "no such device" in server.service.engines.trouble)
    status, said = await _ready(server.api, **server.api.headers)
    assert status == 503 and "no such device" in said["detail"]
    assert "no such device" not in str(await _ready(server.api))


async def test_a_refused_model_is_named_with_the_reason(start_server: StartServer) -> None:
    server = await start_server(engine=OneRefused)
    assert await _ready(server.api) == (200, {"status": "ready"})
    status, said = await _ready(server.api, **server.api.headers)
    assert status == 200
    assert said["refused_models"] == [{"name": REFUSED.name, "reason": REFUSED.reason}]


async def test_a_server_without_any_model_is_not_ready(start_server: StartServer) -> None:
    server = await start_server(engine=AllRefused)
    status, said = await _ready(server.api)
    assert status == 503
    assert said == {"status": "not ready", "detail": "there is no model that can be served"}
    _, said = await _ready(server.api, **server.api.headers)
    assert said["refused_models"][0]["reason"] == REFUSED.reason


async def test_whoever_asks_for_a_refused_model_hears_the_reason(
    start_server: StartServer,
) -> None:
    server = await start_server(engine=OneRefused)
    api, session = server.api, await server.api.session()
    asked = {"session_id": session, "base_model": REFUSED.name}
    model = {**asked, "model_seq_id": 0, "lora_config": {"rank": 4}}
    sampler = {**asked, "sampling_session_seq_id": 0}
    for path, body in (("/create_model", model), ("/create_sampling_session", sampler)):
        response = await api.post(path, body)
        assert response.status_code == 400
        assert REFUSED.reason in response.json()["detail"]
    chat = {"model": REFUSED.name, "prompt": "x"}
    response = await api.http.post("/oai/api/v1/completions", json=chat, headers=api.headers)
    assert response.status_code == 404 and REFUSED.reason in response.text
    assert await api.create_model(session), "the other model is served"


async def test_health_readiness_and_metrics_need_no_key(server: TestServer) -> None:
    http: httpx.AsyncClient = server.api.http
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    assert (await http.get("/api/v1/healthz")).json() == {"status": "ok"}
    await server.api.model()
    assert (await http.get("/readyz")).status_code == 200
    text = (await http.get("/metrics")).text
    assert 'tinsmith_operations_total{kind="create_model",status="done"} 1' in text
    server.service.begin_drain()
    assert (await http.get("/readyz")).status_code == 503
