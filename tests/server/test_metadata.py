"""What one owner may write down about models and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tinsmith.server.metadata import MetadataRoom, size_of
from tinsmith.server.store.errors import OverQuotaError, StoreUnavailableError
from tinsmith.server.tuning import Tuning

if TYPE_CHECKING:
    import httpx

    from tests.support.in_process_server import Api, StartServer, TestServer

LARGE = {"about": "x" * 9_000}
LIMIT = 50_000


async def _create(
    api: Api, session: str, number: int, metadata: dict[str, str] | None = None
) -> httpx.Response:
    body = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "tinsmith/fake",
        "lora_config": {"rank": 4},
        "user_metadata": metadata,
    }
    return await api.post("/create_model", body)


async def _save(api: Api, model: str, seq_id: int, metadata: dict[str, str] | None) -> Any:
    """The answer: where it was saved, or why not."""
    body = {"model_id": model, "seq_id": seq_id, "user_metadata": metadata}
    promise = await api.ok("/save_weights", {**body, "path": f"c{seq_id}"})
    return (await api.retrieve(promise["request_id"])).json()


async def test_what_an_owner_writes_about_models_has_a_bound_together(
    start_server: StartServer,
) -> None:
    """At once, one after another, and after a restart; another owner has his own."""
    server = await start_server(key_max_metadata_bytes=LIMIT)
    api = server.api
    session = await api.session()
    answers = await asyncio.gather(*(_create(api, session, n, LARGE) for n in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [403] * 7
    refused = next(answer.text for answer in answers if answer.status_code == 403)
    assert f"the limit is {LIMIT} (key_max_metadata_bytes)" in refused
    accepted = next(n for n, answer in enumerate(answers) if answer.status_code == 200)
    again = await _create(api, session, accepted, LARGE)
    assert again.json() == answers[accepted].json(), "it has its room"
    other = await server.other_user()
    assert (await _create(other, await other.session(), 0, LARGE)).status_code == 200
    await server.stop()
    server = await start_server(key_max_metadata_bytes=LIMIT)
    assert (await _create(server.api, session, 20, LARGE)).status_code == 403
    assert (await _create(server.api, session, 21, {"a": "small"})).status_code == 200


async def test_a_request_that_comes_again_is_not_refused_for_the_model_that_it_made(
    start_server: StartServer,
) -> None:
    server = await start_server(key_max_models=1)
    session = await server.api.session()
    first, again = [await _create(server.api, session, 0) for _ in range(2)]
    assert first.status_code == 200 and again.json() == first.json()
    assert (await _create(server.api, session, 1)).status_code == 403


async def test_what_an_owner_writes_about_checkpoints_counts_with_it(
    start_server: StartServer,
) -> None:
    server = await start_server(key_max_metadata_bytes=LIMIT, tuning=Tuning(count_pause=0.0))
    api = server.api
    model = await api.model()
    saved = [await _save(api, model, seq_id, LARGE) for seq_id in range(1, 6)]
    refused = await _save(api, model, 6, LARGE)
    assert "key_max_metadata_bytes" in refused["error"] and refused["category"] == "user"
    kept = await server.service.store.weights.ids()
    assert len(kept) == 5, "nothing was written for it"
    copied = await api.post("/copy_weights", {"source_path": saved[0]["path"]})
    assert copied.status_code == 403 and "key_max_metadata_bytes" in copied.text
    assert (await _create(api, await api.session(), 0, LARGE)).status_code == 403
    assert "path" in await _save(api, model, 7, None), "without metadata there is room"
    path = f"/training_runs/{model}/checkpoints/weights/c1"
    assert (await api.http.delete(f"/api/v1{path}", headers=api.headers)).status_code == 204
    assert "path" in await _save(api, model, 8, LARGE), "what was deleted leaves room"


async def test_the_name_of_a_project_counts_for_each_model_of_a_session(
    start_server: StartServer,
) -> None:
    server = await start_server(key_max_metadata_bytes=LIMIT)
    api = server.api
    session = await api.session()
    for number in range(6):
        await api.create_model(session, number)
    moved = await api.http.put(
        f"/api/v1/sessions/{session}/project",
        json={"project_id": "x" * 9_000},
        headers=api.headers,
    )
    assert moved.status_code == 403 and "key_max_metadata_bytes" in moved.text
    large = await api.session(project_id="x" * 9_000)
    answers = [await _create(api, large, number) for number in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [403]


async def test_what_could_not_be_written_takes_no_room_and_what_is_being_written_does(
    server: TestServer,
) -> None:
    room = MetadataRoom(server.service.store, 100)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with room.taken("o", 80):
                raise RuntimeError("the disk is full")
    async with room.taken("o", 80):
        with pytest.raises(OverQuotaError):
            async with room.taken("o", 80):
                raise AssertionError
        async with room.taken("other", 80):
            pass
    assert size_of(None, {}, "short", {"a": "short"}) == 0
    assert size_of("x" * 98) == 100


class Texts:
    """Counts how often somebody asks what there is."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_asked = 0
        self.is_asked = asyncio.Event()

    async def text_bytes(self, owner: str, above: int) -> int:
        self.num_asked += 1
        self.is_asked.set()
        await asyncio.sleep(0.02)
        return self.num_bytes


def _room(models: Texts, most: int) -> MetadataRoom:
    return MetadataRoom(cast(Any, SimpleNamespace(models=models, checkpoints=Texts())), most)


async def test_who_has_no_room_has_it_looked_for_now_and_then_however_often_he_asks() -> None:
    """Each time all that he has was read."""
    models = Texts()
    models.num_bytes = 90
    room = _room(models, 100)
    for _ in range(50):
        with pytest.raises(OverQuotaError):
            async with room.taken("o", 80):
                raise AssertionError
    assert models.num_asked <= 2
    models.num_bytes = 0
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.1)
            with contextlib.suppress(OverQuotaError):
                async with room.taken("o", 80):
                    break


async def test_what_may_have_been_written_is_looked_for() -> None:
    models = Texts()
    room = _room(models, 100)
    with pytest.raises(StoreUnavailableError):
        async with room.taken("o", 80):
            models.num_bytes = 80
            raise StoreUnavailableError("the connection was lost")
    with pytest.raises(OverQuotaError):
        async with room.taken("o", 80):
            raise AssertionError


async def test_what_is_written_while_others_ask_for_the_first_time_counts_once() -> None:
    models = Texts()
    room = _room(models, 100)

    async def write() -> None:
        async with room.taken("o", 40):
            models.num_bytes += 40
            await asyncio.sleep(0.01)

    first = asyncio.create_task(write())
    await models.is_asked.wait()
    await asyncio.gather(first, write())
    async with room.taken("o", 20):
        assert models.num_asked == 1


async def test_a_text_counts_as_the_store_has_it(server: TestServer) -> None:
    about = {"über": "数据" * 50}
    await _create(server.api, await server.api.session(), 0, cast(Any, about))
    model, *_ = (await server.service.store.models.page_of_owner("owner", 10, 0)).items
    assert model.user_metadata == about
    assert await server.service.store.models.text_bytes("owner", 64) == size_of(about)
