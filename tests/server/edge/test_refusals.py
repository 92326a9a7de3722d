"""What is refused before it is read, and names that lead nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.datastructures import Headers
from tinker._constants import DEFAULT_MAX_RETRIES

from tinsmith.server.edge.http import WAIT, with_pause

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer


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


async def test_all_tries_of_the_official_client_together_last_for_a_minute(
    start_server: StartServer,
) -> None:
    """A database that is started again may be away for longer than ten pauses of a second."""
    api = (await start_server(key_max_queued_operations=1)).api
    model = await api.model()
    await api.send_step(model, 3)  # waits for 1 and 2
    pauses = []
    for tries in range(DEFAULT_MAX_RETRIES):
        api.headers["x-stainless-retry-count"] = str(tries)
        refused = await api.post_pass(model, 4, [])
        assert refused.status_code == 429
        pauses.append(int(refused.headers["retry-after"]))
        assert refused.headers["retry-after-ms"] == f"{pauses[-1]}000"
    assert pauses[:5] == [1] * 5 and pauses == sorted(pauses)
    assert sum(pauses) >= 60 and max(pauses) <= 60, "the client heeds no longer pause"


@pytest.mark.parametrize("tries", ["", "-1", "x", "1e9", "0x1", "9" * 5000])
def test_whatever_a_client_says_of_its_tries_there_is_a_pause(tries: str) -> None:
    told = with_pause(Headers({"x-stainless-retry-count": tries}), WAIT)
    assert 1 <= int(told["retry-after"]) <= 60


def test_a_refusal_that_does_not_ask_for_another_try_stays_as_it_is() -> None:
    asked = Headers({"x-stainless-retry-count": "7"})
    assert with_pause(asked, None) == {}
    assert with_pause(asked, {"location": "/"}) == {"location": "/"}
