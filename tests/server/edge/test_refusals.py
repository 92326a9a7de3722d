"""What is refused before it is read, and names that lead nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
