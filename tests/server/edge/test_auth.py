"""Whose request it is: keys, tokens, and what is there for others."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

import pytest

from tinsmith.server.edge.auth import Auth

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.in_process_server import Api, TestServer


async def _saved(api: Api, model: str, seq_id: int, name: str) -> str:
    body = {"model_id": model, "seq_id": seq_id, "path": name}
    promise = await api.ok("/save_weights", body)
    return str((await api.result(promise["request_id"]))["path"])


async def test_without_a_known_key_every_endpoint_answers_401(server: TestServer) -> None:
    stranger = server.client("tml-wrong")
    for path in ("/client/config", "/create_session", "/asample", "/retrieve_future"):
        response = await stranger.post(path, {})
        assert response.status_code == 401 and "key" in response.json()["detail"]
    assert (await stranger.get("/training_runs")).status_code == 401


async def test_a_bearer_header_is_as_good_as_an_api_key(server: TestServer) -> None:
    headers = {"authorization": f"Bearer {server.api.key}"}
    response = await server.api.http.get("/api/v1/get_server_capabilities", headers=headers)
    assert response.status_code == 200


async def test_a_revoked_key_is_no_longer_accepted(server: TestServer) -> None:
    other = await server.other_user()
    me = (await other.get("/auth/apikey/me")).json()
    assert me["name"] == "other" and me["details"]["org_details"]["name"] == "somebody-else"
    response = await other.http.delete("/api/v1/auth/apikey/me", headers=other.headers)
    assert response.status_code == 204
    assert (await other.get("/auth/apikey/me")).status_code == 401


async def test_a_key_revoked_in_the_database_alone_is_refused_within_a_second(
    server: TestServer,
) -> None:
    """By another server or a tool with which no file is shared."""
    other = await server.other_user()
    me = (await other.get("/auth/apikey/me")).json()
    assert me["name"] == "other"
    keys = await server.service.store.keys.list()
    revoked = next(key for key in keys if key.name == "other")
    await server.service.store.keys.revoke(revoked.key_id, time.time())
    await asyncio.sleep(1.0)
    assert (await other.get("/auth/apikey/me")).status_code == 401


async def test_a_token_stands_for_its_key_until_the_key_is_revoked(server: TestServer) -> None:
    other = await server.other_user()
    jwt = (await other.ok("/auth/token", {}))["jwt"]
    with_token = server.client(jwt)
    assert (await with_token.get("/auth/apikey/me")).json()["name"] == "other"
    head, claims, signature = jwt.split(".")
    forged = server.client(f"{head}.{claims}.{signature[:-2]}xx")
    assert (await forged.get("/auth/apikey/me")).status_code == 401
    await other.http.delete("/api/v1/auth/apikey/me", headers=other.headers)
    assert (await with_token.get("/auth/apikey/me")).status_code == 401


async def test_what_belongs_to_somebody_else_is_not_there(server: TestServer) -> None:
    api, other = server.api, await server.other_user()
    session = await api.session()
    model = await api.create_model(session)
    request_id = await api.send_pass(model, 1)
    await api.result(request_id)
    path = await _saved(api, model, 2, "mine")
    sampler = (
        await api.ok(
            "/create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
        )
    )["sampling_session_id"]
    attempts = [
        ("/session_heartbeat", {"session_id": session}),
        (
            "/create_model",
            {"session_id": session, "model_seq_id": 9, "base_model": "tinsmith/fake"},
        ),
        ("/get_info", {"model_id": model}),
        ("/optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}),
        ("/save_weights", {"model_id": model, "seq_id": 3, "path": "x"}),
        ("/retrieve_future", {"request_id": request_id}),
        ("/weights_info", {"tinker_path": path}),
        ("/asample", api.sample_body(sampler)),
        ("/join_sampling_session", {"sampling_session_id": sampler}),
        ("/copy_weights", {"source_path": path, "destination_project_id": "p"}),
    ]
    for endpoint, body in attempts:
        assert (await other.post(endpoint, body)).status_code == 404, endpoint
    for url in (
        f"/sessions/{session}",
        f"/training_runs/{model}",
        f"/training_runs/{model}/checkpoints",
        f"/training_runs/{model}/checkpoints/weights/mine/external_weights_urls",
        f"/samplers/{sampler}",
    ):
        assert (await other.get(url)).status_code == 404, url
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/mine"
    assert (await other.http.delete(url, headers=other.headers)).status_code == 404
    assert (await other.get("/checkpoints")).json()["checkpoints"] == []
    # Nor did any of the attempts use up a number of the owner's model.
    assert await api.loss(model, 3) > 0


async def test_a_published_checkpoint_may_be_read_by_others_and_changed_by_none(
    server: TestServer,
) -> None:
    api, other = server.api, await server.other_user()
    model = await api.model()
    path = await _saved(api, model, 1, "open")
    url = f"/training_runs/{model}/checkpoints/weights/open"
    assert (await api.post(f"{url}/publish", b"")).status_code == 204
    assert (await other.ok("/weights_info", {"tinker_path": path}))["lora_rank"] == 4
    session = await other.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    loaded = await other.ok("/load_weights", body)
    assert (await other.result(loaded["request_id"]))["model_id"] == f"{session}:train:0"
    assert (await other.post(f"{url}/publish", b"")).status_code == 404
    run = await other.get(f"/training_runs/{model}", access_scope="accessible")
    assert run.json()["last_checkpoint"]["tinker_path"] == path


async def test_a_weights_access_token_reads_what_its_owner_may(server: TestServer) -> None:
    api, other = server.api, await server.other_user()
    path = await _saved(api, await api.model(), 1, "lent")
    model = await other.model()
    body = {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    error, category = await other.failure((await other.ok("/load_weights", body))["request_id"])
    assert "no checkpoint" in error and category == "user"
    lent = {**body, "seq_id": 2, "weights_access_token": api.key}
    promise = await other.ok("/load_weights", lent)
    await other.result(promise["request_id"])
    recorded = await server.service.store.log.read_payload(promise["request_id"])
    assert api.key.encode() not in recorded, "the token must not be kept"


async def test_keys_never_reach_the_logs(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await server.api.model()
    await server.client("tml-secret-of-somebody").post("/create_session", {})
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("tinsmith"))
    assert server.api.key not in ours and "tml-secret" not in ours


async def test_the_disk_is_asked_for_changed_keys_a_few_times_a_second_however_many_requests_come(
    server: TestServer, tmp_path: Path
) -> None:
    num_looks = 0

    class Changes(type(tmp_path)):  # type: ignore[misc]  # the class of paths on this system
        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            nonlocal num_looks
            num_looks += 1
            return os.stat_result((0,) * 10)

    auth = Auth(server.service.store, b"", is_required=True, changes=Changes(tmp_path))
    began = time.monotonic()
    for _ in range(2000):
        assert await auth.resolve(server.api.key) is not None
    assert num_looks <= 5 + 50 * (time.monotonic() - began)
