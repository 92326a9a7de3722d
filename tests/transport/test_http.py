"""One request over the wire: TLS, HTTP/2, proxies, redirects, connection classes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.scripted_server import Answer, Recorded, ScriptedServer
from tinsmith.errors import APIConnectionError, APIStatusError, APITimeoutError, TinkerError
from tinsmith.transport.base import Request
from tinsmith.transport.config import ClientConfig, ProxyRule
from tinsmith.transport.http import Http
from tinsmith.wire.endpoints import ConnectionClass

trustme = pytest.importorskip("trustme")

OK = Answer(200, {"ok": True})


async def fetch(config: ClientConfig, url: str, **options: Any) -> Any:
    http = Http(config)
    try:
        return await http.send(Request(method="GET", url=url, **options))
    finally:
        await http.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    ca = trustme.CA()
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return ca, path


@pytest.fixture
def secure_server(authority: tuple[Any, Path]) -> Iterator[Any]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority[0].issue_cert("127.0.0.1").configure_cert(context)
    server = ScriptedServer(tls=context)
    server.default = lambda request: OK
    yield server
    server.close()


async def test_a_certificate_of_ones_own_is_trusted_when_given(
    secure_server: Any, authority: tuple[Any, Path]
) -> None:
    config = ClientConfig(base_url=secure_server.url, ca_file=authority[1])
    assert (await fetch(config, f"{secure_server.url}/x")).json() == {"ok": True}
    with pytest.raises(APIConnectionError):
        await fetch(replace(config, ca_file=None), f"{secure_server.url}/x")
    with pytest.raises(TinkerError, match=r"missing\.pem"):
        await fetch(replace(config, ca_file=Path("missing.pem")), f"{secure_server.url}/x")


class Http2Server(asyncio.Protocol):
    """Just enough HTTP/2 to answer, with the h2 state machine."""

    def __init__(self, log: list[Any]) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self._log = log
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))

    transports: ClassVar[list[Any]] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.transports.append(transport)
        self._log.append("connection")
        self._h2.initiate_connection()
        transport.write(self._h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        from h2 import events

        for event in self._h2.receive_data(data):
            if isinstance(event, events.RequestReceived):
                path = dict(event.headers)[":path"]
                self._log.append(path)
                if path == "/goaway" and self._log.count(path) == 1:
                    self._h2.close_connection()
                else:
                    self._h2.send_headers(event.stream_id, [(":status", "200")])
                    self._h2.send_data(event.stream_id, b'{"version": 2}', end_stream=True)
        self._transport.write(self._h2.data_to_send())
        if self._log[-1] == "/goaway" and self._log.count("/goaway") == 1:
            self._transport.close()


async def test_http2_is_spoken_where_the_server_offers_it(authority: tuple[Any, Path]) -> None:
    """S63, S69: many requests share a connection; training keeps to HTTP/1.1."""
    pytest.importorskip("h2")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority[0].issue_cert("127.0.0.1").configure_cert(context)
    context.set_alpn_protocols(["h2", "http/1.1"])
    log: list[Any] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Http2Server(log), "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    http = Http(ClientConfig(base_url=url, ca_file=authority[1]))

    def request(path: str) -> Request:
        return Request(method="GET", url=url + path, connection=ConnectionClass.SAMPLE)

    await http.send(request("/0"))
    answers = await asyncio.gather(*(http.send(request(f"/{n}")) for n in range(1, 20)))
    assert all(answer.json() == {"version": 2} for answer in answers)
    assert log.count("connection") == 1
    with pytest.raises(APIConnectionError):
        await http.send(request("/goaway"))
    assert (await http.send(request("/goaway"))).status_code == 200
    await http.close()
    server.close()
    while Http2Server.transports:
        Http2Server.transports.pop().abort()
    await asyncio.sleep(0.01)


async def test_more_requests_than_a_connection_carries_open_another(
    authority: tuple[Any, Path],
) -> None:
    """S62: long polls over HTTP/2 do not wait for each other."""
    http = Http(ClientConfig(base_url="https://127.0.0.1:1", ca_file=authority[1]))
    used = [http.take_lane(ConnectionClass.RETRIEVE) for _ in range(120)]
    assert len(set(map(id, used))) == 3
    for lane in used:
        http.leave_lane(lane, ConnectionClass.RETRIEVE)
    assert http.take_lane(ConnectionClass.RETRIEVE) is used[0]
    await http.close()


async def test_a_proxy_is_used_and_exceptions_are_respected(server: Any) -> None:
    """Through a plain HTTP proxy, which is sent the whole address."""
    seen: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head.split(b" ")[1].decode())
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"proxied":true')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    running = await asyncio.start_server(proxy, "127.0.0.1", 0)
    proxy_url = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    server.on("/x", OK)
    rule = ProxyRule(url=proxy_url, scheme="http")
    config = ClientConfig(base_url="http://service.invalid", proxies=(rule,))
    answer = await fetch(config, "http://service.invalid/x")
    assert answer.content.startswith(b'{"proxied"') and seen == ["http://service.invalid/x"]
    direct = replace(config, proxies=(replace(rule, no_proxy="127.0.0.1"),))
    assert (await fetch(direct, f"{server.url}/x")).json() == {"ok": True}
    running.close()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_without_the_credential(
    server: Any, config: ClientConfig, status: int
) -> None:
    other = ScriptedServer()
    other.on("/there", OK)
    server.on("/here", Answer(status, b"", {"location": f"{other.url}/there"}))
    server.on("/near", Answer(status, b"", {"location": "/x"}))
    server.on("/x", OK)
    secret = {"X-API-Key": "tml-secret", "X-Other": "1"}
    await fetch(config, f"{server.url}/here", headers=secret)
    await fetch(config, f"{server.url}/near", headers=secret)
    far, near = other.requests[0].headers, server.seen("/x")[0].headers
    other.close()
    assert "x-api-key" not in far and far["x-other"] == "1"
    assert near["x-api-key"] == "tml-secret"


async def test_a_body_is_only_redirected_when_it_would_arrive(
    server: Any, config: ClientConfig
) -> None:
    server.on("/moved", Answer(302, b"", {"location": "/x"}))
    server.on("/kept", Answer(307, b"", {"location": "/x"}))
    server.on("/x", OK)
    server.on("/circle", Answer(307, b"", {"location": "/circle"}))
    http = Http(config)
    await http.send(Request(method="POST", url=f"{server.url}/kept", content=b"abc"))
    assert server.seen("/x")[0].body == b"abc"
    # A status error, which is final: the next attempt would be redirected, too.
    with pytest.raises(APIStatusError, match="base URL"):
        await http.send(Request(method="POST", url=f"{server.url}/moved", content=b"abc"))
    with pytest.raises(APIConnectionError, match="redirects"):
        await http.send(Request(method="POST", url=f"{server.url}/circle", content=b"abc"))
    await http.close()


async def test_classes_do_not_share_connections(server: Any, config: ClientConfig) -> None:
    """S62, S64, S99: with one class saturated the others get through."""
    is_over = False

    async def answer(request: Recorded) -> Answer:
        while request.path == "/held" and not is_over:  # noqa: ASYNC110  # another thread ends it
            await asyncio.sleep(0.02)
        return OK

    server.on("/held", answer)
    server.on("/free", answer)
    http = Http(config)
    held = [
        asyncio.create_task(
            http.send(
                Request(method="GET", url=f"{server.url}/held", connection=ConnectionClass.RETRIEVE)
            )
        )
        for _ in range(300)
    ]
    await asyncio.sleep(0.3)
    async with asyncio.timeout(30):
        for kind in ConnectionClass:
            await http.send(Request(method="GET", url=f"{server.url}/free", connection=kind))
    assert not any(each.done() for each in held)
    is_over = True
    await asyncio.gather(*held)
    await http.close()
    by_class = {r.connection for r in server.seen("/free")}
    assert len(by_class) == len(ConnectionClass)


async def test_open_training_requests_have_a_connection_each(
    server: Any, config: ClientConfig
) -> None:
    """S63"""
    server.on("/t", Answer(200, {}, delay=0.1))
    http = Http(config)
    request = Request(method="POST", url=f"{server.url}/t", content=b"x")
    await asyncio.gather(*(http.send(request) for _ in range(10)))
    await http.close()
    assert len({r.connection for r in server.seen("/t")}) == 10


async def test_time_limits_and_dead_ends_are_our_errors(server: Any, config: ClientConfig) -> None:
    server.on("/slow", Answer(fault="stall"))
    with pytest.raises(APITimeoutError):
        await fetch(config, f"{server.url}/slow", timeout_seconds=0.05)
    with pytest.raises(APIConnectionError, match="refused"):
        await fetch(config, "http://127.0.0.1:1/x")


async def test_no_time_limit_differs_from_the_default_one(
    server: Any, config: ClientConfig
) -> None:
    """S22: leaving it out means 60 seconds, None means none."""
    server.on("/later", Answer(200, {}, delay=0.3))
    assert Request(method="GET", url=server.url).timeout_seconds == 60.0
    with pytest.raises(APITimeoutError):
        await fetch(config, f"{server.url}/later", timeout_seconds=0.05)
    await fetch(config, f"{server.url}/later", timeout_seconds=None)


async def test_errors_show_what_the_server_said(server: Any, config: ClientConfig) -> None:
    server.on("/json", Answer(418, {"detail": "teapot"}))
    server.on("/text", Answer(500, b"plain words"))
    server.on("/none", Answer(503, b""))
    for path, message in (("/json", "teapot"), ("/text", "plain words"), ("/none", "503")):
        with pytest.raises(APIStatusError, match=message):
            await fetch(config, server.url + path)


async def test_a_body_can_be_read_piece_by_piece(server: Any, config: ClientConfig) -> None:
    server.on("/big", Answer(200, b"x" * 3_000_000))
    server.on("/gone", Answer(404, {"detail": "gone"}))
    http = Http(config)
    async with http.stream(Request(method="GET", url=f"{server.url}/big")) as (head, pieces):
        assert head.status_code == 200 and head.content == b""
        assert sum([len(piece) async for piece in pieces]) == 3_000_000
    with pytest.raises(APIStatusError, match="gone"):
        async with http.stream(Request(method="GET", url=f"{server.url}/gone")):
            raise AssertionError("not reached")
    await http.close()


def test_requests_in_errors_show_and_pickle_without_the_credential() -> None:
    import pickle

    request = Request(method="POST", url="http://x", headers={"X-API-Key": "tml-secret", "A": "b"})
    error = APIConnectionError(request, "no")
    copy = pickle.loads(pickle.dumps(error))
    assert "tml-secret" not in repr(request) and "tml-secret" not in pickle.dumps(error).decode(
        "latin1"
    )
    assert copy.request.headers == {"A": "b"} and copy.message == "no"
