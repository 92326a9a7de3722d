"""Clients that leave, stall or send half: what they held is free again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.support.listening import listening
from tinsmith.server.edge.admission import FEW_REQUESTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from tests.support.in_process_server import Api, StartServer, TestServer

PROTO = "application/x-protobuf"


class _Text:
    """Stands for every model's tokenizer: a token per byte."""

    def get(self, base: Any) -> _Text:
        return self

    def encode(self, text: str, *, context: int) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t % 128 for t in tokens).decode()


class Visitor:
    """One request at the level of ASGI: parts of a body when we say so, and leaving when we do."""

    def __init__(self, server: TestServer, path: str, **headers: str) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        all_headers = {"x_api_key": server.api.key, **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in all_headers.items()],
        }
        self.task = asyncio.create_task(server.app(scope, self._incoming.get, self._send))

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(dict(message))

    def give(self, body: bytes, *, is_last: bool = True) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": not is_last})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_openai_client_that_leaves_frees_its_place(
    start_server: StartServer, is_stream: bool
) -> None:
    server = await start_server(fake_token_seconds=0.2)
    server.service.text_models = _Text()  # type: ignore[assignment]
    visitor = Visitor(server, "/oai/api/v1/completions")
    body = {
        "model": "tinsmith/fake",
        "prompt": ["a", "b"],
        "max_tokens": 1000,
        "n": 2,
        "stream": is_stream,
    }
    visitor.give(orjson.dumps(body))
    engine = server.engines[0]
    await server.until(lambda: engine.running_samples >= 1)
    visitor.leave()
    await server.until(lambda: not engine.running_samples)
    await asyncio.wait_for(visitor.task, 30)
    assert not any(slot.num_jobs for slot in server.service.engines.slots)
    assert server.service.admission.requests.total == 0


async def test_an_openai_client_that_stays_gets_its_answer(start_server: StartServer) -> None:
    server = await start_server()
    server.service.text_models = _Text()  # type: ignore[assignment]
    visitor = Visitor(server, "/oai/api/v1/completions")
    body = {"model": "tinsmith/fake", "prompt": ["a", "b"], "max_tokens": 3, "n": 2}
    visitor.give(orjson.dumps(body))
    await asyncio.wait_for(visitor.task, 5)
    assert visitor.status == 200
    assert len(orjson.loads(visitor.sent[1]["body"])["choices"]) == 4


async def test_samples_for_openai_clients_count_among_those_under_way(
    start_server: StartServer,
) -> None:
    server = await start_server(fake_token_seconds=0.2, max_queued_samples=4)
    server.service.text_models = _Text()  # type: ignore[assignment]
    visitor = Visitor(server, "/oai/api/v1/completions")
    body = {"model": "tinsmith/fake", "prompt": ["a", "b"], "max_tokens": 1000}
    visitor.give(orjson.dumps(body))
    await server.until(lambda: server.engines[0].running_samples == 2)
    late = Visitor(server, "/oai/api/v1/completions")
    late.give(orjson.dumps(body))
    await asyncio.wait_for(late.task, 10)
    assert late.status == 429
    visitor.leave()
    await asyncio.wait_for(visitor.task, 10)


async def _slow_promise(api: Api) -> str:
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": "tinsmith/fake",
        "lora_config": {"rank": 4},
    }
    return str((await api.ok("/create_model", body))["request_id"])


@pytest.mark.slow
async def test_a_poll_whose_client_left_is_not_held(start_server: StartServer) -> None:
    server = await start_server(fake_pass_seconds=5, hold_seconds=30)
    request_id = await _slow_promise(server.api)
    visitor = Visitor(server, "/api/v1/retrieve_future")
    visitor.give(orjson.dumps({"request_id": request_id}))
    promise = server.service.promises.get(request_id)
    assert promise is not None
    await server.until(lambda: len(promise.waiters) == 1)
    visitor.leave()
    await asyncio.wait_for(visitor.task, 10)
    assert not promise.waiters


async def test_a_large_body_gives_its_memory_back_however_it_ends(
    start_server: StartServer,
) -> None:
    server = await start_server(max_active_body_bytes=8 * 2**20)
    admission = server.service.admission
    path, size = "/api/v1/forward_backward", 3 * 2**20
    announced = {"content_type": PROTO, "content_length": str(size)}
    first = Visitor(server, path, **announced)
    first.give(bytes(2**20), is_last=False)
    await server.until(lambda: admission.body_bytes.total == size)
    second = Visitor(server, path, **announced)
    await asyncio.wait_for(second.task, 10)
    assert second.status == 429, "one owner has at most half"
    other = Visitor(server, path, **announced, x_api_key=(await server.other_user()).key)
    other.give(bytes(size))
    await asyncio.wait_for(other.task, 5)
    assert other.status == 400, "another owner has room; the body is nonsense"
    assert admission.body_bytes.total == size
    first.leave()
    await asyncio.wait_for(first.task, 10)
    assert admission.body_bytes.total == 0


async def test_a_body_without_a_length_is_counted_as_it_comes(start_server: StartServer) -> None:
    server = await start_server(max_active_body_bytes=8 * 2**20, max_body_bytes=2**24)
    visitor = Visitor(server, "/api/v1/forward_backward", content_type=PROTO)
    visitor.give(bytes(3 * 2**20), is_last=False)
    await server.until(lambda: server.service.admission.body_bytes.total == 3 * 2**20)
    visitor.give(bytes(3 * 2**20), is_last=False)
    await asyncio.wait_for(visitor.task, 10)
    assert visitor.status == 429
    assert server.service.admission.body_bytes.total == 0


async def test_who_falls_silent_in_the_middle_of_a_body_is_not_waited_for(
    start_server: StartServer,
) -> None:
    server = await start_server(body_patience_seconds=0.2)
    visitor = Visitor(server, "/api/v1/optim_step")
    visitor.give(b"{", is_last=False)
    await asyncio.wait_for(visitor.task, 10)
    assert visitor.status == 400


async def test_beyond_the_limit_requests_are_told_to_wait(start_server: StartServer) -> None:
    server = await start_server(max_active_requests=4)
    held = [Visitor(server, "/api/v1/session_heartbeat") for _ in range(2)]
    await server.until(lambda: server.service.admission.requests.total == 2)
    response = await server.api.post("/session_heartbeat", {"session_id": "x"})
    assert response.status_code == 429 and int(response.headers["retry-after-ms"]) > 0
    other = await server.other_user()
    assert (await other.get("/sessions")).status_code == 200, "others have their share"
    # Clients up to 0.20 die of a 429 here.
    response = await server.api.post("/retrieve_future", {"request_id": "x"})
    assert response.status_code == 404
    for visitor in held:
        visitor.leave()
        await asyncio.wait_for(visitor.task, 10)
    assert server.service.admission.requests.total == 0
    assert (await server.api.get("/sessions")).status_code == 200


async def test_an_owner_who_sends_too_fast_waits_alone(
    start_server: StartServer,
) -> None:
    server = await start_server(key_max_requests_per_second=5)
    server.service.admission.penalty_seconds = 0.3
    other = await server.other_user()
    began = time.monotonic()
    answers = await asyncio.gather(*(server.api.get("/sessions") for _ in range(30)))
    statuses = [answer.status_code for answer in answers]
    taken = time.monotonic() - began
    assert 10 <= statuses.count(200) <= 14 + 5 * taken and set(statuses) == {200, 429}
    assert taken >= 0.3, "refusals come late, so that they are few"
    # A question for a result is late as well, but not refused.
    poll = await server.api.post("/retrieve_future", {"request_id": "x"})
    assert poll.status_code == 404
    server.service.admission.penalty_seconds = 600.0
    late = asyncio.gather(*(server.api.get("/sessions") for _ in range(30)))
    assert (await other.get("/sessions")).status_code == 200
    assert not late.done()
    late.cancel()


async def test_who_has_much_under_way_is_refused_while_the_loop_is_behind(
    server: TestServer,
) -> None:
    held = [Visitor(server, "/api/v1/session_heartbeat") for _ in range(FEW_REQUESTS)]
    await server.until(lambda: server.service.admission.requests.total == FEW_REQUESTS)
    other = await server.other_user()
    assert (await server.api.get("/sessions")).status_code == 200
    time.sleep(1.5)  # noqa: ASYNC251  # what a server that cannot keep up looks like
    await asyncio.sleep(0)
    await server.until(lambda: server.service.admission.lag_seconds > 1, seconds=0.2)
    assert (await server.api.get("/sessions")).status_code == 429
    assert (await other.get("/sessions")).status_code == 200, "it is not the other's fault"
    await server.until(lambda: server.service.admission.lag_seconds < 1)
    assert (await server.api.get("/sessions")).status_code == 200
    for visitor in held:
        visitor.leave()
        await asyncio.wait_for(visitor.task, 10)


@pytest.fixture
async def impatient(start_server: StartServer) -> AsyncIterator[tuple[str, int]]:
    """Where a server listens that does not wait long for a head."""
    async with listening(await start_server(head_seconds=0.3)) as (where, _):
        yield where


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_without_a_whole_request_is_closed(
    impatient: tuple[str, int], sent: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*impatient)
    writer.write(sent)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_connection_may_be_idle_between_requests(
    impatient: tuple[str, int],
) -> None:
    reader, writer = await asyncio.open_connection(*impatient)
    for _ in range(2):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 30)).endswith(b"200 OK\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), 30)
        await asyncio.sleep(0.4)
    writer.close()


@pytest.mark.slow
async def test_who_asks_much_at_once_and_goes_leaves_nothing_behind(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(fake_pass_seconds=5, hold_seconds=30)
    api = server.api
    request_id = await _slow_promise(api)
    body = orjson.dumps({"request_id": request_id})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nhost: x\r\nx-api-key: {api.key}\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    async with listening(server) as (where, state):
        _, writer = await asyncio.open_connection(*where)
        writer.write(request * 20)
        promise = server.service.promises.get(request_id)
        assert promise is not None
        await server.until(lambda: len(promise.waiters) == 1)
        writer.transport.abort()
        await server.until(lambda: not state.connections and not state.tasks, seconds=2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
