"""A server that follows, in this process: what passes through it, and what happens when the one
that leads does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.support.listening import connections_to
from tinsmith.server.edge.auth import hash_key
from tinsmith.server.edge.connections import Connection
from tinsmith.server.edge.sockets import Sockets
from tinsmith.server.metrics import Metrics
from tinsmith.server.replicas import upstream
from tinsmith.server.replicas.lease import Holder, View
from tinsmith.server.replicas.replica import Replica, ReplicaConfig
from tinsmith.server.serving import console_link

if TYPE_CHECKING:
    from tests.support.in_process_server import TestServer

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE"]

PATIENCE_SECONDS = 300.0
"""For what takes a moment on an idle machine."""


class ScriptedLease:
    """Says what a test tells it to."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.view = View()
        self.store_id = None
        self.is_certain = True
        self.missed: list[Holder] = []

    @property
    def is_held(self) -> bool:
        return self.view.epoch is not None and self.is_certain

    def show(self, view: View) -> None:
        self.view = view
        self._on_change()

    def miss(self, holder: Holder) -> None:
        self.missed.append(holder)

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Follower:
    def __init__(self, replica: Replica, lease: ScriptedLease, http: httpx.AsyncClient) -> None:
        self.replica = replica
        self.lease = lease
        self.http = http
        self.num_requests = 0
        """That have come here."""

    def follow(self, url: str, epoch: int = 1) -> None:
        self.lease.show(View(other=Holder(url, epoch)))


@contextlib.asynccontextmanager
async def listening(app: Any, at: socket.socket | None = None) -> AsyncIterator[str]:
    async with connections_to(app, Sockets(1000), head_seconds=PATIENCE_SECONDS, at=at) as up:
        (host, port), _ = up
        yield f"http://{host}:{port}"


@contextlib.contextmanager
def nobody() -> Iterator[tuple[str, socket.socket]]:
    """An address that nobody listens at; nor can another program take it meanwhile."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        host, port = place.getsockname()
        yield f"http://{host}:{port}", place


@contextlib.asynccontextmanager
async def leading(
    respond: Callable[[Request], Awaitable[Response]],
) -> AsyncIterator[str]:
    """A server that leads, and answers everything in one way."""
    app = Starlette(routes=[Route("/{path:path}", respond, methods=METHODS)])
    async with listening(app) as url:
        yield url


@contextlib.asynccontextmanager
async def following(
    patience_seconds: float = PATIENCE_SECONDS, **config: Any
) -> AsyncIterator[Follower]:
    leases: list[ScriptedLease] = []

    def lease(on_change: Callable[[], None]) -> Any:
        leases.append(ScriptedLease(on_change))
        return leases[-1]

    async def lead(epoch: int) -> Any:
        async def here(request: Request) -> Response:
            return PlainTextResponse(b"here: " + await request.body())

        async def stop(self: object) -> None: ...

        service = type("Service", (), {"begin_drain": lambda self: None, "stop": stop})()
        return service, Starlette(routes=[Route("/{path:path}", here, methods=METHODS)])

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        there.num_requests += 1
        await replica(scope, receive, send)

    settings = ReplicaConfig(patience_seconds=patience_seconds, **config)
    replica = Replica(lease, lead, Metrics(), settings, lambda: None)
    async with (
        listening(counted) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as http,
    ):
        there = Follower(replica, leases[0], http)
        try:
            yield there
        finally:
            await replica.stop()


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    async with following() as there:
        yield there


async def until(is_so: Callable[[], object]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not is_so():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def holding(server: TestServer) -> AsyncIterator[str]:
    """A real server that leads."""
    leases: list[ScriptedLease] = []

    def lease(on_change: Callable[[], None]) -> Any:
        leases.append(ScriptedLease(on_change))
        return leases[-1]

    async def lead(epoch: int) -> Any:
        return server.service, server.app

    replica = Replica(
        lease, lead, Metrics(), ReplicaConfig(patience_seconds=PATIENCE_SECONDS), lambda: None
    )
    leases[0].show(View(epoch=1))
    await server.until(lambda: replica.service is not None)
    async with listening(replica) as url:
        yield url


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose connections are said to be, in all servers."""
    names: list[str] = []

    def name(self: Connection, owner: str) -> bool:
        names.append(owner)
        return True

    monkeypatch.setattr(Connection, "name", name)
    return names


async def _echo(request: Request) -> Response:
    body = await request.body()
    about = f"{request.method} {request.url.path}?{request.url.query}"
    return PlainTextResponse(
        body, status_code=207, headers={"about": about, "seen": str(dict(request.headers))}
    )


async def test_a_request_and_its_answer_pass_as_they_are(follower: Follower) -> None:
    async with leading(_echo) as url:
        follower.follow(url)
        answer = await follower.http.post(
            "/api/v1/x%20y?a=1&b=%2F", content=b"body", headers={"x-api-key": "tml-k"}
        )
        assert (answer.status_code, answer.content) == (207, b"body")
        assert answer.headers["about"] == "POST /api/v1/x y?a=1&b=%2F"
        seen = answer.headers["seen"]
        assert "'x-api-key': 'tml-k'" in seen and "'x-tinsmith-hop': '1'" in seen
        assert f"'host': '{follower.http.base_url.netloc.decode()}'" in seen
        assert len(answer.headers.get_list("date")) <= 1
        for method in ("GET", "DELETE", "HEAD"):
            again = await follower.http.request(method, "/other")
            assert again.status_code == 207 and again.headers["about"] == f"{method} /other?"


async def test_bodies_without_a_length_and_large_ones_pass_whole(follower: Follower) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(40):
            yield bytes([number]) * 1_000_000

    async with leading(_echo) as url:
        follower.follow(url)
        for _ in range(2):
            answer = await follower.http.post("/x", content=pieces())
            assert len(answer.content) == 40_000_000
            assert answer.content[::1_000_000] == bytes(range(40))
    assert follower.replica.memory.free_bytes == 256 * 1024 * 1024, "nothing is kept afterwards"


async def test_an_answer_is_passed_on_piece_by_piece(follower: Follower) -> None:
    go_on = asyncio.Event()

    async def stream(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"first"
            await go_on.wait()
            yield b"second"

        return StreamingResponse(events())

    async with leading(stream) as url:
        follower.follow(url)
        async with follower.http.stream("GET", "/x") as answer:
            parts = answer.aiter_raw()
            assert await anext(parts) == b"first"
            go_on.set()
            assert await anext(parts) == b"second"


async def test_a_request_waits_until_somebody_leads_and_until_it_is_the_follower_itself(
    follower: Follower,
) -> None:
    asking = asyncio.create_task(follower.http.post("/x", content=b"1"))
    await until(lambda: follower.num_requests == 1)
    async with leading(_echo) as url:
        follower.follow(url)
        assert (await asking).content == b"1"
    # It does not listen any more: the request goes to whoever is next, and that is us.
    asking = asyncio.create_task(follower.http.post("/x", content=b"2"))
    await until(lambda: follower.num_requests == 2)
    follower.lease.show(View(epoch=2))
    assert (await asking).content == b"here: 2"


async def test_what_a_holder_took_and_never_answered_goes_to_the_next(follower: Follower) -> None:
    taken = asyncio.Event()

    async def never(request: Request) -> Response:
        await request.body()
        taken.set()
        await asyncio.sleep(3600)
        raise AssertionError

    async with leading(never) as stopped, leading(_echo) as url:
        follower.follow(stopped, 1)
        asking = asyncio.create_task(follower.http.post("/x", content=b"again"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await taken.wait()
        follower.follow(url, 2)
        assert (await asking).content == b"again"


async def test_a_server_that_does_not_lead_says_so_and_the_request_waits(
    follower: Follower,
) -> None:
    asked = 0

    async def not_here(request: Request) -> Response:
        nonlocal asked
        asked += 1
        return Response(status_code=503, headers={"x-tinsmith-not-here": "1"})

    async with leading(not_here) as wrong, leading(_echo) as url:
        follower.follow(wrong, 1)
        asking = asyncio.create_task(follower.http.post("/x", content=b"1"))
        await until(lambda: asked)
        follower.follow(url, 2)
        assert (await asking).status_code == 207


async def test_a_request_that_was_passed_on_is_not_passed_on_again(follower: Follower) -> None:
    async with leading(_echo) as url:
        follower.follow(url)
        answer = await follower.http.get("/x", headers={"x-tinsmith-hop": "1"})
    assert answer.status_code == 503 and answer.headers["x-tinsmith-not-here"] == "1"


async def test_when_nobody_leads_for_long_the_client_is_told_to_come_again() -> None:
    async with following(patience_seconds=0.5) as follower:
        answer = await follower.http.post("/x", content=b"1")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json() == {"detail": "no server runs the engines now; send this again"}


async def test_a_body_too_large_to_be_kept_is_asked_for_again() -> None:
    async def cut(request: Request) -> Response:
        await request.body()
        request.scope["tinsmith.connection"].abort()
        return Response()

    async with following(max_body_bytes=1000) as follower, leading(cut) as url:
        follower.follow(url)
        answer = await follower.http.post("/x", content=b"x" * 5000)
    assert answer.status_code == 503 and "does not answer" in answer.json()["detail"]


async def test_half_an_answer_does_not_look_like_a_whole_one(follower: Follower) -> None:
    async def half(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"first"
            request.scope["tinsmith.connection"].abort()
            await asyncio.sleep(3600)

        return StreamingResponse(events())

    async with leading(half) as url:
        follower.follow(url)
        with pytest.raises(httpx.RemoteProtocolError):
            await follower.http.get("/x")


async def test_the_holder_hears_when_a_client_goes_away(follower: Follower) -> None:
    taken, gone = asyncio.Event(), asyncio.Event()

    async def held(request: Request) -> Response:
        await request.body()
        taken.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return Response()

    async with leading(held) as url:
        follower.follow(url)
        asking = asyncio.create_task(follower.http.post("/x", content=b"1"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await taken.wait()
            asking.cancel()
            await gone.wait()


async def test_health_and_metrics_are_the_followers_own(follower: Follower) -> None:
    assert (await follower.http.get("/healthz")).json() == {"status": "ok"}
    nobody = await follower.http.get("/readyz")
    assert nobody.status_code == 503 and nobody.json()["role"] == "follower"
    async with leading(_echo) as url:
        follower.follow(url, 7)
        await follower.http.get("/x")
        ready = await follower.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "role": "follower"})
        numbers = (await follower.http.get("/metrics")).text
    assert "tinsmith_leads 0.0" in numbers and "tinsmith_lease_epoch 7.0" in numbers
    assert "tinsmith_forwarded_requests_total 1.0" in numbers


async def test_many_that_wait_for_a_dead_holder_cost_one_look_at_a_time(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trying by itself was 40,000 connections a second, while the lease ran out."""
    tried: Counter[Any] = Counter()  # by each task: a request is one, and whoever looks for all
    connect = upstream.connect

    async def counted(url: str) -> upstream.Link:
        tried[asyncio.current_task()] += 1
        return await connect(url)

    async def some_looks() -> None:
        seen = tried.total()
        await until(lambda: tried.total() >= seen + 3)

    monkeypatch.setattr(upstream, "connect", counted)
    with nobody() as (gone, _):
        follower.follow(gone, 1)
        asking = [asyncio.create_task(follower.http.get(f"/{n}")) for n in range(50)]
        await until(lambda: follower.num_requests == 50)
        await some_looks()
        before = set(tried)
        asking.append(asyncio.create_task(follower.http.get("/late")))
        await until(lambda: follower.num_requests == 51)
        await some_looks()
    assert set(tried) == before, "who comes later waits with the others"
    assert sum(times > 1 for times in tried.values()) == 1, "each at most once, then one for all"
    async with leading(_echo) as url:
        follower.follow(url, 2)
        answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {207}


async def test_who_waits_for_a_dead_holder_hears_when_it_is_back(follower: Follower) -> None:
    with nobody() as (url, place):
        follower.follow(url)
        asking = asyncio.create_task(follower.http.get("/x"))
        await until(lambda: follower.lease.missed)
        assert set(follower.lease.missed) == {Holder(url, 1)}, "whoever keeps the lease is told"
        app = Starlette(routes=[Route("/{path:path}", _echo, methods=METHODS)])
        async with listening(app, place):
            assert (await asking).status_code == 207


async def test_who_waits_hears_when_a_late_renewal_makes_the_lease_certain_again(
    follower: Follower,
) -> None:
    follower.lease.show(View(epoch=1))
    await until(lambda: follower.replica.service is not None)
    follower.lease.is_certain = False
    asking = asyncio.create_task(follower.http.post("/x", content=b"1"))
    await until(lambda: follower.num_requests == 1)
    follower.lease.is_certain = True
    assert (await asking).content == b"here: 1"


async def test_a_server_that_stops_looks_for_nobody_any_more(follower: Follower) -> None:
    """The holder may be slow to refuse a connection; nobody waits for it then."""
    asking = asyncio.create_task(follower.http.get("/x"))

    def looking() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if "Replica._look " in repr(task.get_coro())]

    await until(looking)
    (look,) = looking()
    follower.replica.begin_drain()
    assert (await asking).status_code == 503
    await follower.replica.stop()
    assert look.done()


async def test_a_connection_under_way_when_all_are_ended_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither kept open for later, nor sent what a suspended server would never answer."""
    connect = upstream.connect
    reached = upstream.Upstream()
    made: list[upstream.Link] = []

    async def dropped_meanwhile(url: str) -> upstream.Link:
        made.append(await connect(url))
        reached.drop()
        return made[-1]

    monkeypatch.setattr(upstream, "connect", dropped_meanwhile)
    async with leading(_echo) as url:
        with pytest.raises(ConnectionError, match="given up"):
            await reached.reach(url)
        with pytest.raises(ConnectionError, match="given up"):
            async with reached.link(url):
                pass
        assert [link.is_open for link in made] == [False, False]


def test_a_connection_that_ended_before_the_request_is_an_error_of_the_connection() -> None:
    """On the event loop that servers run on it was another, and the client was told of a fault."""

    async def write_to_the_dead() -> None:
        async with leading(_echo) as url:
            reached = upstream.Upstream()
            await reached.reach(url)
            async with reached.link(url) as link:
                link.abort()
                await asyncio.sleep(0.05)
                with pytest.raises(ConnectionError, match="before the request"):
                    await link.write(b"GET / HTTP/1.1")

    uvloop.run(write_to_the_dead())


async def test_a_connection_counts_as_its_owners_once_the_holder_knows_the_key(
    follower: Follower, server: TestServer, named: list[str]
) -> None:
    """Not as that of each key: an owner has as many keys and tokens as he likes."""
    async with holding(server) as url:
        follower.follow(url)
        token = (await server.api.ok("/auth/token", {}))["jwt"]
        for key in (server.api.key, token):
            named.clear()
            for _ in range(2):
                answer = await follower.http.get(
                    "/api/v1/get_server_capabilities", headers={"x-api-key": key}
                )
                assert answer.status_code == 200 and "x-tinsmith-owner" not in answer.headers
            owner = hash_key("owner")
            assert named == ["owner", owner, "owner"], "by the holder, by the follower, and again"


async def test_only_the_holders_word_makes_a_key_known(
    follower: Follower, server: TestServer, named: list[str]
) -> None:
    """Neither a page for everybody nor a refusal before the key was looked at."""
    link = await console_link(server.service)
    assert link is not None
    login = await server.client("tml-wrong").http.get(link)
    cookie, _, _ = login.headers["set-cookie"].partition(";")
    async with holding(server) as url:
        follower.follow(url)
        paths = {"/openapi.json": 200, "/api/v1/nowhere": 404, "/api/v1/training_runs": 200}
        for path, status in paths.items():
            for _ in range(2):
                headers = {"x-api-key": "tml-wrong", "cookie": cookie}
                answer = await follower.http.get(path, headers=headers)
                assert answer.status_code == status, path
    for status in (413, 429, 503):

        async def refuse(request: Request, status: int = status) -> Response:
            return Response(status_code=status)

        async with leading(refuse) as url:
            follower.follow(url)
            for _ in range(2):
                await follower.http.get("/x", headers={"x-api-key": f"tml-{status}"})
    assert set(named) <= {"owner"}, "the browser's, by the holder"


async def test_the_names_that_a_follower_knows_are_those_used_last(named: list[str]) -> None:
    async def known(request: Request) -> Response:
        return Response(headers={"x-tinsmith-owner": request.headers["x-api-key"]})

    async def revoked(request: Request) -> Response:
        return Response(status_code=401)

    async def ask(*keys: str) -> list[str]:
        named.clear()
        for key in keys:
            await follower.http.get("/x", headers={"x-api-key": key})
        return list(named)

    async with following(max_known=2) as follower:
        async with leading(known) as url:
            follower.follow(url)
            assert await ask("a", "b", "a", "c", "a", "b") == ["a", "a"]
        async with leading(revoked) as url:
            follower.follow(url, 2)
            assert await ask("a", "b", "a", "b") == ["a", "b"], "and then not again"
