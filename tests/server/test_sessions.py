"""How sessions live and end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.server.store.errors import StoreUnavailableError

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


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


async def test_sessions_of_thousands_of_models_are_read_once(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation asks for its session; to read it costs as much as all the rest."""
    sessions, store = server.service.sessions, server.service.store
    record = await store.sessions.get(await server.api.session())
    assert record is not None
    names = [f"{record.session_id}-{number}" for number in range(3000)]
    await asyncio.gather(
        *(store.sessions.add(dataclasses.replace(record, session_id=name)) for name in names)
    )
    for name in names:
        assert await sessions.get(name, record.owner)

    def refused(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(store.database, "in_thread", refused)
    for name in names:
        assert await sessions.get(name, record.owner)


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
        await service.tidy()
        await service.tidy_results()
    assert not any(model.wants_unload for model in service.models), "nobody was silent"
    sampled = await api.post("/asample", api.sample_body(sampler))
    assert sampled.status_code == 200, sampled.text
    await api.result(await api.send_pass(model, 2))


async def test_a_search_reads_a_few_of_many_sessions_at_a_time(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await server.service.sessions.get(await server.api.session(), "owner")
    assert first is not None
    added = [
        # Some of them began at the same moment.
        dataclasses.replace(
            first, session_id=f"s{n:03}", created_at=n // 3, display_name=f"d{n % 2}"
        )
        for n in range(450)
    ]
    store = server.service.store.sessions
    await asyncio.gather(*map(store.add, added))
    database, num_read = server.service.store.database, list[int]()
    read = database.all

    async def counted(*given: Any) -> Any:
        found = await read(*given)
        num_read.append(len(found))
        return found

    monkeypatch.setattr(database, "all", counted)
    names, query = list[str](), {"display_name": "d1", "limit": 100}
    while True:
        page = await server.api.ok("/sessions/search", query)
        names += [summary["session_id"] for summary in page["sessions"]]
        if page.get("next_cursor") is None:
            break
        query["cursor"] = page["next_cursor"]
    assert names == [session.session_id for session in reversed(added) if "d1" in str(session)]
    assert max(num_read) <= 200


async def _begin(api: Api, **fields: Any) -> tuple[int, str]:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "x", **fields}
    response = await api.post("/create_session", body)
    return response.status_code, response.text


async def test_the_texts_in_an_owners_sessions_have_a_bound_together(
    start_server: StartServer,
) -> None:
    """At once, one after another, and after a restart; another owner has his own."""
    server = await start_server(key_max_session_bytes=50_000)
    large = {"user_metadata": {"a": "x" * 9_000}}
    answers = await asyncio.gather(*(_begin(server.api, **large) for _ in range(12)))
    assert sorted(status for status, _ in answers) == [200] * 5 + [403] * 7
    refused = next(text for status, text in answers if status == 403)
    assert "user_metadata: has 9008 bytes" in refused
    assert "would have 54048; the limit is 50000 (key_max_session_bytes)" in refused
    session = await server.api.session()
    project = await server.api.http.put(
        f"/api/v1/sessions/{session}/project",
        json={"project_id": "x" * 9_000},
        headers=server.api.headers,
    )
    assert project.status_code == 403 and "project_id: has 9002 bytes" in project.text
    other = await server.other_user()
    assert (await _begin(other, **large))[0] == 200
    await server.stop()
    server = await start_server(key_max_session_bytes=50_000)
    for field in ({"tags": ["x" * 9_000]}, {"display_name": "x" * 9_000}):
        status, text = await _begin(server.api, **field)
        assert status == 403 and next(iter(field)) in text
    assert (await _begin(server.api))[0] == 200, "a session without metadata can be begun"


@pytest.mark.parametrize("letter", ["x", "ü", "😀", "\n", '"'])
async def test_a_session_ends_whatever_is_said_of_it_and_however_little_room_there_is(
    start_server: StartServer, letter: str
) -> None:
    server = await start_server(key_max_session_bytes=100)
    session = await server.api.session()
    end = {"reason": {"type": "success"}, "detail": letter * 9_000}
    assert (await server.api.post(f"/sessions/{session}/finish", end)).status_code == 204
    ended = await server.service.store.sessions.get(session)
    assert ended is not None and ended.state == "finished"
    detail = ended.finish_detail
    assert detail is not None and 1 < len(detail) <= 64
    assert detail == letter * (len(detail) - 1) + "…"


async def test_an_owner_has_so_many_sessions(start_server: StartServer) -> None:
    server = await start_server(key_max_sessions=3)
    answers = await asyncio.gather(*(_begin(server.api) for _ in range(5)))
    assert sorted(status for status, _ in answers) == [200] * 3 + [403] * 2
    assert any("has 3 sessions; the limit is 3 (key_max_sessions)" in text for _, text in answers)
    assert (await _begin(await server.other_user()))[0] == 200


async def test_a_session_that_could_not_be_recorded_takes_no_room(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(key_max_sessions=1)

    async def away(*_: object) -> None:
        raise StoreUnavailableError("the database is away")

    with monkeypatch.context() as broken:
        broken.setattr(server.service.store.sessions, "add", away)
        assert (await _begin(server.api))[0] == 503
    assert (await _begin(server.api))[0] == 200
