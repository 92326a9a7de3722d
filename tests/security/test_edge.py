"""Where HTTP begins: connections, heads, bodies and web pages that mean harm."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.security.test_leaving import PROTO, Visitor
from tests.support.listening import listening
from tinsmith.errors import TooLargeError
from tinsmith.server.edge.connections import MAX_HEAD_BYTES
from tinsmith.server.edge.shares import Shares
from tinsmith.server.edge.workers import Workers
from tinsmith.wire import json
from tinsmith.wire.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.in_process_server import Api, StartServer, TestServer

Address = tuple[str, int]


@pytest.fixture
async def address(server: TestServer) -> AsyncIterator[Address]:
    async with listening(server) as (where, _):
        yield where


async def _status(reader: asyncio.StreamReader) -> int:
    line = await asyncio.wait_for(reader.readline(), 30)
    return int(line.split()[1])


async def _ask(where: Address, request: bytes, local: str = "127.0.0.1") -> int:
    """The status of one request on a connection of its own, from an address of this machine."""
    reader, writer = await asyncio.open_connection(*where, local_addr=(local, 0))
    writer.write(request)
    try:
        return await _status(reader)
    finally:
        writer.close()


def _heartbeat(api: Api, body: bytes = b'{"session_id":"x"}', size: int | None = None) -> bytes:
    head = f"POST /api/v1/session_heartbeat HTTP/1.1\r\nhost: x\r\nx-api-key: {api.key}\r\n"
    size = len(body) if size is None else size
    return f"{head}content-length: {size}\r\n\r\n".encode() + body


@pytest.mark.parametrize("part", [b"a", b"a: b\r\n"], ids=["one header", "many headers"])
@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: ",
        b"POST /api/v1/telemetry HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
    ],
    ids=["head", "trailer"],
)
async def test_an_endless_header_ends(address: Address, beginning: bytes, part: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    writer.write(beginning)
    with contextlib.suppress(ConnectionError):
        for _ in range(400):
            writer.write(part * (MAX_HEAD_BYTES // len(part)))
            await writer.drain()
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 30)
    assert b"200 OK" not in answer
    assert writer.transport.is_closing() or reader.at_eof()
    assert time.process_time() - began < 2
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 20_000, "kilobytes"
    assert await _ask(address, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n") == 200
    writer.close()


async def test_a_head_that_is_too_long_is_told_so(address: Address) -> None:
    head = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (3 * MAX_HEAD_BYTES)
    assert await _ask(address, head) == 431


async def test_a_head_of_usual_length_in_small_pieces_is_read(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    head = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (MAX_HEAD_BYTES - 200) + b"\r\n\r\n"
    for start in range(0, len(head), 1000):
        writer.write(head[start : start + 1000])
        await asyncio.sleep(0)
    assert await _status(reader) == 200
    writer.close()


async def test_a_large_body_after_a_head_is_read(address: Address, server: TestServer) -> None:
    body = orjson.dumps({"session_id": "x" * 900_000})
    assert await _ask(address, _heartbeat(server.api, body)) == 404


async def test_idle_connections_of_strangers_make_room(start_server: StartServer) -> None:
    server = await start_server(max_connections=64)
    async with listening(server) as (where, state):
        idle = [
            await asyncio.open_connection(*where, local_addr=("127.0.0.9", 0)) for _ in range(200)
        ]
        assert len(state.connections) <= 64
        for address in ("127.0.0.1", "127.0.0.9"):
            assert await _ask(where, _heartbeat(server.api), address) == 404
        for _, writer in idle:
            writer.close()
        await server.until(lambda: server.service.sockets.total == 0)


async def test_idle_connections_of_an_owner_leave_room_for_others(
    start_server: StartServer,
) -> None:
    server = await start_server(max_connections=64)
    other = await server.other_user()
    async with listening(server) as (where, _):
        held = []
        statuses = []
        for _ in range(100):
            reader, writer = await asyncio.open_connection(*where)
            writer.write(_heartbeat(server.api))
            statuses.append(await _status(reader))
            held.append(writer)
        assert set(statuses) == {404, 429} and 16 <= statuses.count(404) <= 32
        assert await _ask(where, _heartbeat(other)) == 404
        for writer in held:
            writer.close()


async def test_requests_without_their_bodies_leave_room_for_others(
    start_server: StartServer,
) -> None:
    server = await start_server(max_active_requests=64, body_patience_seconds=600)
    other = await server.other_user()
    async with listening(server) as (where, _):
        waiting = []
        for _ in range(100):
            _, writer = await asyncio.open_connection(*where)
            writer.write(_heartbeat(server.api, b"", size=10))
            waiting.append(writer)
        await server.until(lambda: server.service.admission.requests.total >= 32)
        assert await _ask(where, _heartbeat(server.api)) == 429
        assert await _ask(where, _heartbeat(other)) == 404
        for writer in waiting:
            writer.close()


async def test_bodies_that_do_not_come_are_not_waited_for(start_server: StartServer) -> None:
    server = await start_server(max_active_requests=64, body_patience_seconds=0.3)
    async with listening(server) as (where, _):
        waiting = [asyncio.create_task(_ask(where, _heartbeat(server.api, b"", size=10)))]
        for _ in range(40):
            waiting.append(asyncio.create_task(_ask(where, _heartbeat(server.api, b"", size=10))))
        assert set(await asyncio.gather(*waiting)) <= {400, 429}
        assert await waiting[0] == 400
        assert server.service.admission.requests.total == 0
        assert await _ask(where, _heartbeat(server.api)) == 404


async def test_small_bodies_are_counted_from_their_first_byte(start_server: StartServer) -> None:
    server = await start_server(max_active_body_bytes=8 * 2**20)
    path, part = "/api/v1/forward_backward", bytes(2**19)
    visitors = [Visitor(server, path, content_type=PROTO) for _ in range(12)]
    for visitor in visitors:
        visitor.give(part, is_last=False)
    await server.until(lambda: sum(visitor.task.done() for visitor in visitors) == 4)
    assert server.service.admission.body_bytes.total == 8 * len(part), "half of the room"
    assert {visitor.status for visitor in visitors if visitor.task.done()} == {429}
    other = Visitor(server, path, content_type=PROTO, x_api_key=(await server.other_user()).key)
    other.give(part)
    await asyncio.wait_for(other.task, 30)
    assert other.status == 400, "there was room for it; it is nonsense"
    for visitor in visitors:
        visitor.leave()
        await asyncio.wait_for(visitor.task, 30)
    assert server.service.admission.body_bytes.total == 0


async def test_a_body_that_trickles_is_not_waited_for(start_server: StartServer) -> None:
    server = await start_server(body_patience_seconds=0.3, min_body_bytes_per_second=1000)
    trickle = Visitor(server, "/api/v1/optim_step")
    flow = Visitor(server, "/api/v1/optim_step")
    for _ in range(10):
        trickle.give(b" ", is_last=False)
        flow.give(b" " * 3000, is_last=False)
        await asyncio.sleep(0.1)
    assert trickle.task.done() and trickle.status == 400
    assert not flow.task.done()
    flow.leave()
    await asyncio.wait_for(flow.task, 30)


def test_whoever_asks_may_hold_as_much_as_is_free() -> None:
    shares = Shares(100)
    taken = dict.fromkeys("abc", 0)
    for owner in taken:
        while shares.take(owner):
            taken[owner] += 1
    assert taken == {"a": 50, "b": 25, "c": 13}
    assert shares.total == 88 and shares.of("a") == 50
    shares.give_back("a", 50)
    assert shares.of("a") == 0 and shares.take("d", 31) and not shares.take("e", 32)


def test_what_is_larger_than_any_share_gets_in_alone() -> None:
    shares = Shares(10)
    assert shares.take("a", 100) and not shares.take("b", 1)
    shares.give_back("a", 100)
    assert shares.take("b", 10)


@pytest.fixture
async def bare(start_server: StartServer) -> TestServer:
    """A server without authentication."""
    return await start_server(auth=False)


OTHER_NAMES = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "127.0.0.1:8000@evil.example",
    "localhost:evil.example",
    "[::1].evil.example",
    "10.0.0.5",
    "",
    "[::2]",
]


@pytest.mark.parametrize("host", OTHER_NAMES)
async def test_without_authentication_the_server_answers_to_its_own_name_only(
    bare: TestServer, host: str
) -> None:
    for path in ("/api/v1/sessions", "/healthz", "/metrics", "/api/v1/training_runs/x"):
        response = await bare.api.http.get(path, headers={"host": host})
        assert response.status_code == 403
    assert "public_url" in response.json()["detail"]


OWN_NAMES = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1:8000",
    "127.0.0.2",
    "[::1]:8000",
    "localhost.",
]


@pytest.mark.parametrize("host", OWN_NAMES)
async def test_loopback_names_are_its_own(bare: TestServer, host: str) -> None:
    response = await bare.api.http.get("/api/v1/sessions", headers={"host": host})
    assert response.status_code == 200


async def test_a_configured_name_is_its_own(start_server: StartServer) -> None:
    server = await start_server(auth=False, public_url="https://train.example:8443")
    for headers in (
        {"host": "train.example:8443"},
        {"host": "127.0.0.1:8000", "origin": "https://train.example:8443"},
    ):
        response = await server.api.http.get("/api/v1/sessions", headers=headers)
        assert response.status_code == 200


PAGES: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://127.0.0.1:8001"},
    {"origin": "file://"},
    {"origin": "http://["},
    {"origin": "http://[::1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
]


@pytest.mark.parametrize("headers", PAGES, ids=str)
@pytest.mark.parametrize("auth", [True, False], ids=["with keys", "without"])
async def test_web_pages_of_other_sites_are_refused(
    start_server: StartServer, headers: dict[str, str], auth: bool
) -> None:
    server = await start_server(auth=auth)
    all_headers = {"host": "127.0.0.1:8000", **server.api.headers, **headers}
    for method, path in (("GET", "sessions"), ("DELETE", "auth/apikey/me"), ("POST", "asample")):
        response = await server.api.http.request(method, f"/api/v1/{path}", headers=all_headers)
        assert response.status_code == 403 and "web pages" in response.json()["detail"]
    del all_headers[next(iter(headers))]
    response = await server.api.http.get("/api/v1/sessions", headers=all_headers)
    assert response.status_code == 200, "the same without a page"


async def test_a_page_of_its_own_and_a_link_are_let_in(server: TestServer) -> None:
    for headers in (
        {"host": "a.example", "origin": "https://a.example", "sec-fetch-site": "same-origin"},
        {"host": "a.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"host": "a.example", "sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    ):
        response = await server.api.http.get("/healthz", headers=headers)
        assert response.status_code == 200


async def test_a_token_cannot_outlive_itself_nor_manage_its_key(
    start_server: StartServer,
) -> None:
    server = await start_server(token_seconds=600)
    first = (await server.api.ok("/auth/token", {}))["jwt"]
    with_token = server.client(first)
    await asyncio.sleep(1.1)
    second = (await with_token.ok("/auth/token", {}))["jwt"]
    assert _claims(second)["exp"] == _claims(first)["exp"], "renewed by itself it ends as before"
    revoked = await with_token.http.delete("/api/v1/auth/apikey/me", headers=with_token.headers)
    assert revoked.status_code == 403 and "send the key" in revoked.json()["detail"]
    assert (await server.api.get("/sessions")).status_code == 200


async def test_a_token_near_its_end_is_not_exchanged(start_server: StartServer) -> None:
    """A client that holds nothing else would ask again at once, for ever."""
    server = await start_server(token_seconds=200)
    with_token = server.client((await server.api.ok("/auth/token", {}))["jwt"])
    assert (await with_token.post("/auth/token", {})).status_code == 403
    assert (await with_token.get("/sessions")).status_code == 200
    assert (await server.api.post("/auth/token", {})).status_code == 200


def _claims(token: str) -> Any:
    from tinker.lib._jwt_auth import jwt_claims

    return jwt_claims(token)


async def test_whoever_sends_many_large_bodies_waits_behind_his_own() -> None:
    workers = Workers("bodies")
    done: list[str] = []

    def work(name: str) -> None:
        time.sleep(0.02)
        done.append(name)

    greedy = [asyncio.create_task(workers.run("greedy", work, f"greedy {n}")) for n in range(10)]
    await asyncio.sleep(0)
    await workers.run("other", work, "other")
    assert done.index("other") <= 2, "after the one under way, and the one whose turn was next"
    await asyncio.gather(*greedy)
    assert [name for name in done if name != "other"] == [f"greedy {n}" for n in range(10)]
    workers.close()


async def test_who_leaves_while_waiting_for_a_turn_does_not_hold_it() -> None:
    workers = Workers("bodies")
    tasks = [asyncio.create_task(workers.run("a", time.sleep, 0.05)) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait_for(workers.run("b", time.sleep, 0), 30)
    await asyncio.wait_for(tasks[2], 30)
    with pytest.raises(ZeroDivisionError):
        await workers.run("a", lambda: 1 // 0)
    await asyncio.wait_for(workers.run("a", time.sleep, 0), 30)
    workers.close()


def test_a_json_body_of_more_numbers_than_anybody_sends_is_refused() -> None:
    with pytest.raises(TooLargeError, match=r"1310720 values; JSON allows no more: .*protobuf"):
        json.parse(b'{"a":[' + b"1," * (DEFAULT_LIMITS.max_json_values + 1) + b"1]}")


DEEP: Any = "x"
for _ in range(20):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"user_metadata": {f"n{n}": "x" for n in range(300)}}, "300 entries"),
        ({"user_metadata": {"a": "x" * 100_000}}, "the limit is 65536"),
        ({"user_metadata": {"a": ["x"] * 30_000}}, "the limit is 65536"),
        ({"user_metadata": DEEP}, "levels deep"),
        ({"tags": ["x"] * 300}, "300 entries"),
        ({"display_name": "x" * 100_000}, "display_name: has 100002 bytes"),
        ({"project_id": "x" * 100_000}, "project_id: has 100002 bytes"),
        ({"user_metadata": {"a": "x" * 2_000_000}}, "the limit is 1048576"),
    ],
    ids=["many", "long", "a long list", "deep", "many tags", "name", "project", "a large body"],
)
async def test_what_is_kept_of_a_session_is_small(
    api: Api, fields: dict[str, Any], reason: str
) -> None:
    response = await api.post(
        "/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x", **fields}
    )
    assert response.status_code == 413 and reason in response.json()["detail"]
    assert await api.session(user_metadata={"run": {"lr": 0.1, "layers": [1, 2]}}, tags=["a"])
