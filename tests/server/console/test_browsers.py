"""Browsers: a key or a link becomes a cookie, which counts for little and ends with its key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.support.event_stream import listening
from tinsmith.server.console import browsers
from tinsmith.server.serving import console_link
from tinsmith.server.store.browsers import MAX_PER_KEY
from tinsmith.server.store.records import BrowserSessionRecord
from tinsmith.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    import httpx

    from tests.support.in_process_server import Api, StartServer, TestServer

OWN_PAGE = {"sec-fetch-site": "same-origin"}


async def _login(api: Api) -> str:
    response = await api.http.post("/console/login", json={"key": api.key})
    assert response.status_code == 204, response.text
    api.http.cookies.clear()
    header = response.headers["set-cookie"]
    assert "HttpOnly" in header and "SameSite=strict" in header and "Path=/" in header
    return str(response.cookies["tinsmith_session"])


def _cookie(cookie: str, **headers: str) -> dict[str, str]:
    return {"cookie": f"tinsmith_session={cookie}", **headers}


async def _look(api: Api, cookie: str) -> httpx.Response:
    return await api.http.get("/api/v1/training_runs", headers=_cookie(cookie))


async def test_a_key_is_exchanged_for_a_cookie_that_may_look(api: Api) -> None:
    run = await api.model()
    cookie = await _login(api)
    assert (await _look(api, cookie)).json()["training_runs"][0]["training_run_id"] == run
    assert (await _look(api, cookie + "x")).status_code == 401


async def test_a_wrong_key_gets_no_cookie(api: Api) -> None:
    response = await api.http.post("/console/login", json={"key": "tml-" + "x" * 40})
    assert response.status_code == 401 and "set-cookie" not in response.headers


async def test_a_token_gets_no_cookie(api: Api) -> None:
    """With a cookie it could revoke the key that it was made from."""
    token = (await api.ok("/auth/token", {}))["jwt"]
    response = await api.http.post("/console/login", json={"key": token})
    assert response.status_code == 403 and "send the key" in response.json()["detail"]
    assert "set-cookie" not in response.headers


async def test_a_cookie_survives_a_restart_and_ends_with_a_logout(
    start_server: StartServer,
) -> None:
    server = await start_server()
    cookie = await _login(server.api)
    await server.stop()
    server = await start_server()
    api = server.api
    assert (await _look(api, cookie)).status_code == 200
    logout = await api.http.post("/console/logout", headers=_cookie(cookie, **OWN_PAGE))
    assert logout.status_code == 204 and 'tinsmith_session=""' in logout.headers["set-cookie"]
    assert (await _look(api, cookie)).status_code == 401


async def test_a_cookie_and_its_stream_end_with_the_key(server: TestServer) -> None:
    other = await server.other_user()
    cookie = await _login(other)
    async with listening(server.app, cookie=f"tinsmith_session={cookie}") as stream:
        await server.until(lambda: server.service.events.num_readers == 1)
        key_id = (await other.get("/console/keys")).json()["keys"][0]["key_id"]
        path = f"/api/v1/console/keys/{key_id}"
        revoked = await other.http.delete(path, headers=_cookie(cookie, **OWN_PAGE))
        assert revoked.status_code == 204
        assert [event.name for event in await stream.ended(3.0)] == ["goodbye"]
    assert (await _look(other, cookie)).status_code == 401


async def test_keys_are_listed_and_revoked_by_their_owner_alone(server: TestServer) -> None:
    api, other = server.api, await server.other_user()
    keys = (await api.get("/console/keys")).json()["keys"]
    assert [(key["name"], key["is_current"]) for key in keys] == [("first", True)]
    path = f"/api/v1/console/keys/{keys[0]['key_id']}"
    assert (await other.http.delete(path, headers=other.headers)).status_code == 404
    token = (await api.ok("/auth/token", {}))["jwt"]
    refused = await api.http.delete(path, headers={"authorization": f"Bearer {token}"})
    assert refused.status_code == 403 and "send a key" in refused.json()["detail"]
    assert (await api.http.delete(path, headers=api.headers)).status_code == 204
    assert (await api.get("/console/keys")).status_code == 401


async def test_a_cookie_ends_after_a_while(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    cookie = await _login(api)
    later = time.time() + browsers.SESSION_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert (await _look(api, cookie)).status_code == 401


async def test_a_cookie_does_not_count_for_the_protocol(api: Api) -> None:
    headers = _cookie(await _login(api), **OWN_PAGE)
    for row in ENDPOINTS.values():
        if row.access == "key" and row.method != "GET" and not row.is_for_browsers:
            response = await api.http.request(row.method, row.full_path, headers=headers, json={})
            assert response.status_code == 401, row.path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin", "origin": "http://server"}, 204),
        ({"origin": "http://server"}, 204),
        ({"sec-fetch-site": "none"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://server"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "http://evil"}, 403),
        ({"origin": "http://server:81"}, 403),
        ({"origin": "null"}, 403),
        ({}, 403),
    ],
)
async def test_an_action_by_cookie_needs_a_page_of_this_server(
    api: Api, headers: dict[str, str], status: int
) -> None:
    run = await api.model()
    saved = await api.ok("/save_weights", {"model_id": run, "seq_id": 1, "path": "mine"})
    await api.result(saved["request_id"])
    url = f"/api/v1/training_runs/{run}/checkpoints/weights/mine"
    cookie = await _login(api)
    response = await api.http.delete(url, headers=_cookie(cookie, **headers))
    assert response.status_code == status, response.text
    assert len((await api.get("/checkpoints")).json()["checkpoints"]) == (status != 204)


async def test_the_link_that_the_server_prints_lets_one_browser_in_once(
    server: TestServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await api.model()
    link = await console_link(server.service)
    assert link is not None and link.startswith("http://server/console/login?token=")
    first = await api.http.get(link)
    assert (first.status_code, first.headers["location"]) == (303, "/")
    api.http.cookies.clear()
    assert run in (await _look(api, first.cookies["tinsmith_session"])).text
    again = await api.http.get(link)
    assert again.headers["location"] == "/login?reason=link" and "set-cookie" not in again.headers
    later = time.time() + browsers.LINK_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    shown = await _look(api, first.cookies["tinsmith_session"])
    assert shown.status_code == 200, "the link is short-lived, the browser's session is not"
    link = str(await console_link(server.service))
    later += browsers.LINK_SECONDS + 1
    late = await api.http.get(link)
    assert late.headers["location"] == "/login?reason=link" and "set-cookie" not in late.headers


async def test_without_authentication_the_link_is_the_server_itself(
    start_server: StartServer,
) -> None:
    server = await start_server(auth=False)
    assert await console_link(server.service) == "http://server/"


async def test_only_hashes_of_cookies_are_stored(server: TestServer, api: Api) -> None:
    cookie = await _login(api)
    files = [f.read_bytes() for f in server.service.folder.root.glob("tinsmith.db*")]
    assert files and not any(cookie.encode() in content for content in files)


async def test_a_key_lets_in_so_many_browsers_and_the_oldest_leaves(
    server: TestServer,
) -> None:
    other = await server.other_user()
    others = await _login(other)
    cookies = [await _login(server.api) for _ in range(2)]
    for cookie in cookies:
        assert (await _look(server.api, cookie)).status_code == 200
    store, now = server.service.store, time.time()
    key_id = next(key.key_id for key in await store.keys.list() if key.name == "first")
    for number in range(MAX_PER_KEY - 3):
        await store.browsers.add(
            BrowserSessionRecord(
                cookie_hash=str(number), key_id=key_id, created_at=now, expires_at=now + 60
            )
        )
    cookies += [await _login(server.api) for _ in range(2)]
    found = [(await _look(server.api, cookie)).status_code for cookie in cookies]
    assert found == [401, 200, 200, 200]
    assert (await _look(other, others)).status_code == 200, "another key's"


async def test_a_stranger_who_logs_out_writes_nothing(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    browsers_in_store = server.service.store.browsers
    delete = browsers_in_store.delete

    async def noted(digest: str) -> None:
        written.append(digest)
        await delete(digest)

    monkeypatch.setattr(browsers_in_store, "delete", noted)
    cookie = await _login(server.api)
    for sent, count in ((cookie + "x", 0), (cookie, 1), (cookie, 1)):
        logout = await server.api.http.post("/console/logout", headers=_cookie(sent, **OWN_PAGE))
        assert logout.status_code == 204 and len(written) == count
