"""Who may do what, how sessions live and end, and what is refused before it is read."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tinsmith.errors import ValidationError
from tinsmith.server.config import build_config, load_config
from tinsmith.types import Datum, ModelInput

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Api, StartServer, TestServer


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


async def test_a_finished_session_is_over(api: Api) -> None:
    session = await api.session()
    model = await api.create_model(session)
    body = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"/sessions/{session}/finish", body)).status_code == 204
    assert (await api.post(f"/sessions/{session}/finish", body)).status_code == 204
    assert (await api.post("/session_heartbeat", {"session_id": session})).status_code == 410
    response = await api.post_pass(model, 1, [])
    assert response.status_code == 400 and "finished" in response.json()["detail"]


async def test_a_silent_session_goes_to_disk_and_wakes_up_where_it_was(
    start_server: StartServer,
) -> None:
    server = await start_server(session_timeout_seconds=0.2)
    api = server.api
    model = await api.model()
    await api.result(await api.send_pass(model, 1))
    await api.result(await api.send_step(model, 2))
    before = await api.loss(model, 3)
    await asyncio.sleep(0.3)
    await server.service.sessions.sweep()
    server.service.scheduler.wake_all()
    live = await server.service.models.get(model)
    assert live is not None
    await server.until(lambda: not live.generation)
    assert await api.loss(model, 4) == before


async def test_a_body_above_the_limit_is_refused_before_it_is_read(
    start_server: StartServer,
) -> None:
    server = await start_server(max_body_bytes=1000)
    response = await server.api.post("/create_session", b"x" * 2000)
    assert response.status_code == 413 and "1000" in response.json()["detail"]

    async def endless() -> object:
        while True:
            yield b"x" * 500

    response = await server.api.http.post(
        "/api/v1/create_session",
        content=endless(),  # type: ignore[arg-type]  # an asynchronous iterator of bytes
        headers=server.api.headers,
    )
    assert response.status_code == 413


async def test_limits_per_key_are_kept(start_server: StartServer) -> None:
    server = await start_server(key_max_models=1, key_max_queued_bytes=400, key_max_stored_bytes=1)
    api = server.api
    session = await api.session()
    model = await api.create_model(session)
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tinsmith/fake"}
    second = await api.post("/create_model", {**body, "lora_config": {"rank": 4}})
    assert second.status_code == 403 and "at most 1" in second.json()["detail"]
    await api.send_pass(model, 3)  # waits for 1 and 2
    responses = [await api.post_pass(model, n, _probe()) for n in (4, 5)]
    assert [r.status_code for r in responses] == [200, 429]
    assert responses[1].headers["retry-after-ms"] == "1000"
    for seq_id in (1, 2):
        await server.service.recorder.refuse("owner", model, seq_id, "not needed")
    await api.result(await api.send_step(model, 5))
    full = await api.ok("/save_weights", {"model_id": model, "seq_id": 6, "path": "first"})
    error, category = await api.failure(full["request_id"])
    assert category == "user" and "at most 1 may" in error


async def test_unnamed_samplers_count_in_the_quota(start_server: StartServer) -> None:
    server = await start_server()
    size = await _size_of_a_sampler(server)
    await server.stop()
    server = await start_server(key_max_stored_bytes=2 * size)
    api = server.api
    model = await api.model()
    sampler = {"model_id": model, "sampling_session_seq_id": 1}
    first = await api.ok("/save_weights_for_sampler", {**sampler, "seq_id": 1})
    await api.result(first["request_id"])
    full = await api.post(
        "/save_weights_for_sampler", {**sampler, "seq_id": 2, "sampling_session_seq_id": 2}
    )
    detail = full.json()["detail"]
    assert full.status_code == 403 and str(2 * size) in detail, "the first one was there before"


async def test_the_quota_is_checked_again_when_a_save_runs(start_server: StartServer) -> None:
    """All of them are sent before the first has run."""
    server = await start_server()
    size = await _size_of_a_sampler(server)
    await server.stop()
    server = await start_server(key_max_stored_bytes=3 * size + size // 2, fake_pass_seconds=0.2)
    api = server.api
    model = await api.model()
    await api.send_pass(model, 1)
    ids = []
    for seq_id in range(2, 6):
        body = {"model_id": model, "seq_id": seq_id, "path": f"n{seq_id}"}
        ids.append((await api.ok("/save_weights_for_sampler", body))["request_id"])
    for request_id in ids[:2]:
        await api.result(request_id)
    for request_id in ids[2:]:
        error, category = await api.failure(request_id)
        assert category == "user" and str(3 * size + size // 2) in error
    folder = server.service.config.data_dir / "weights"
    assert len([*folder.iterdir()]) == 3, "nothing is left of those that were refused"
    copied = await api.post(
        "/copy_weights", {"source_path": f"tinker://{model}/sampler_weights/n2"}
    )
    assert copied.status_code == 403, "nor may a copy go beyond"


async def _size_of_a_sampler(server: TestServer) -> int:
    """The bytes of one unnamed sampler, which is there from then on."""
    model = await server.api.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    made = await server.api.ok("/save_weights_for_sampler", body)
    await server.api.result(made["request_id"])
    return await server.service.store.weights.bytes_of_owner("owner")


def _probe() -> list[Datum]:
    tensors = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    return [Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs=tensors)]


async def test_unknown_paths_and_methods_are_refused_in_the_usual_form(api: Api) -> None:
    response = await api.post("/no_such_thing", {})
    assert response.status_code == 404 and response.json()["detail"]
    response = await api.http.get("/api/v1/create_session", headers=api.headers)
    assert response.status_code == 405 and response.json()["detail"]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "x" * 300, "a\x00b", "%2e%2e"])
async def test_names_cannot_lead_out_of_the_data_folder(
    api: Api, tmp_path: Path, name: str
) -> None:
    model = await api.model()
    response = await api.post("/save_weights", {"model_id": model, "seq_id": 1, "path": name})
    assert response.status_code == 400
    assert [p.name for p in _inside(tmp_path)] == ["data"]


@pytest.mark.parametrize(
    "path", ["/files/../server.lock", "/files/x/../../tinsmith.db", "/archives/x.tar"]
)
async def test_files_are_served_to_signed_urls_only(api: Api, path: str) -> None:
    response = await api.http.get(f"/api/v1{path}?expires=99999999999&signature=x")
    assert response.status_code in (403, 404)


async def test_keys_never_reach_the_logs(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await server.api.model()
    await server.client("tml-secret-of-somebody").post("/create_session", {})
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("tinsmith"))
    assert server.api.key not in ours and "tml-secret" not in ours


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


def test_an_unknown_setting_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ValidationError, match="did you mean 'hold_seconds'"):
        build_config({"hold_second": 1})


def test_settings_come_from_file_environment_and_command_line_in_that_order(
    tmp_path: Path,
) -> None:
    file = tmp_path / "t.toml"
    file.write_text('port = 1\nhold_seconds = 2.5\nhost = "127.0.0.1"\n[models]\na = "b"\n')
    environ = {"TINSMITH_PORT": "2", "TINSMITH_AUTH": "false", "OTHER": "x"}
    config = load_config(file, {"port": 3, "device": None}, environ)
    assert (config.port, config.hold_seconds, config.auth) == (3, 2.5, False)
    assert config.models == {"a": "b"}


def test_a_server_without_authentication_listens_on_loopback_only() -> None:
    with pytest.raises(ValidationError, match="loopback"):
        build_config({"auth": False, "host": "0.0.0.0"})


async def test_a_clock_that_jumps_ahead_ends_no_session_and_takes_no_sampler(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty days: longer than anything that a silent session leaves is kept."""
    api, service = server.api, server.service
    session = await api.session()
    model = await api.create_model(session)
    await api.result(await api.send_pass(model, 1))
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinsmith/fake"}
    sampler = (await api.ok("/create_sampling_session", body))["sampling_session_id"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 40 * 86400.0)
    for _ in range(2):
        await service._tidy()
        await service._tidy_results()
    assert not any(model.wants_unload for model in service.models), "nobody was silent"
    sampled = await api.post("/asample", api.sample_body(sampler))
    assert sampled.status_code == 200, sampled.text
    await api.result(await api.send_pass(model, 2))
