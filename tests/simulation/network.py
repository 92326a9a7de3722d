"""The network between clients and servers, and between servers: requests in, answers out.

It delays both, loses either, and delivers some requests twice, the second time perhaps much later.
Who asks hears of an answer that was lost, or of a server that does not listen, as of a connection
that broke.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope, Send

from tests.simulation.processes import Process, outside
from tinsmith.server.replicas.body import Body, ClientGoneError
from tinsmith.server.replicas.forwarding import HOP, NOT_HERE, Answered

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Headers
    body: bytes

    def header(self, wanted: bytes) -> bytes:
        return next((value for name, value in self.headers if name == wanted), b"")


class Host(Protocol):
    """Where requests go."""

    name: str
    process: Process
    app: ASGIApp | None
    """None while nobody listens."""

    @property
    def leads(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Call:
    """A request under way, as its two ends see it."""

    answered: asyncio.Future[Answer | None]
    """By the answer, or by None when the connection broke."""
    host: Host
    has_left: bool = False
    """Whether the caller has gone away."""
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    """For that."""
    patience: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    sent: list[Message] = field(default_factory=list)

    def end(self, answer: Answer | None) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)
            if self.patience is not None:
                self.patience.cancel()

    def leave(self) -> None:
        self.end(None)
        self.has_left = True
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def until_left(self) -> None:
        if not self.has_left:
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.append(waiter)
            await waiter


class Network:
    def __init__(self, random: random.Random, knowledge: float) -> None:
        """`knowledge` is how often the load balancer knows who leads."""
        self._random = random
        self._knowledge = knowledge
        self._hosts: dict[str, Host] = {}
        self._calls: dict[Call, None] = {}
        self.cut: set[frozenset[str]] = set()
        """Pairs of names between which nothing passes."""
        self.is_lossy = True
        self.num_faults = 0
        """Requests and answers that were lost, and requests that were delivered twice."""

    def join(self, host: Host) -> None:
        self._hosts[host.name] = host

    def balanced(self) -> str:
        """The name of a server, as a load balancer picks one."""
        hosts = list(self._hosts.values())
        leading = [host for host in hosts if host.leads]
        if leading and self._random.random() < self._knowledge:
            hosts = leading
        return self._random.choice(hosts).name

    def call(
        self, source: str, target: str, request: Request, seconds: float | None = None
    ) -> Call:
        """`seconds` is how long the caller waits for the answer."""
        loop = asyncio.get_running_loop()
        call = Call(loop.create_future(), self._hosts[target])
        if seconds is not None:
            call.patience = loop.call_later(seconds, call.leave)
        self._deliver(source, call, request)
        if self.is_lossy and request.method == "POST" and self._random.random() < 0.02:
            self.num_faults += 1
            again = Call(loop.create_future(), call.host)
            pause = self._random.choice((0.1, 5.0, 40.0))
            loop.call_later(pause, self._deliver, source, again, request, context=outside())
        return call

    def takes_connections(self, source: str, target: str) -> bool:
        host = self._hosts[target]
        return host.app is not None and not host.process.is_dead and not self._is_lost(source, host)

    def break_connections(self, host: Host, *, cancel: bool = False) -> None:
        """A process has ended, or stopped listening and lets nobody wait any longer."""
        for call in list(self._calls):
            if call.host is host:
                self._later(call.end, None)
                if cancel and call.task is not None:
                    call.task.cancel()
                if host.process.is_dead:
                    del self._calls[call]

    def _deliver(self, source: str, call: Call, request: Request) -> None:
        if self._is_lost(source, call.host):
            self._later(call.end, None, seconds=3.0)
        else:
            self._later(self._arrive, source, call, request)

    def _arrive(self, source: str, call: Call, request: Request) -> None:
        if call.host.app is None or call.host.process.is_dead:
            self._later(call.end, None)
            return
        self._calls[call] = None
        call.task = call.host.process.spawn(self._serve(source, call, call.host.app, request))

    async def _serve(self, source: str, call: Call, app: ASGIApp, request: Request) -> None:
        try:
            await self._answer(source, call, app, request)
        finally:
            self._calls.pop(call, None)

    async def _answer(self, source: str, call: Call, app: ASGIApp, request: Request) -> None:
        parts: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await call.until_left()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            call.sent.append(message)

        await app(_scope(request), receive, send)
        if call.sent:
            head, *rest = call.sent
            body = b"".join(message.get("body", b"") for message in rest)
            answer = Answer(head["status"], head["headers"], body)
            is_lost = self._is_lost(source, call.host)
            self._later(call.end, None if is_lost else answer)
        else:
            self._later(call.end, None)

    def _is_lost(self, source: str, host: Host) -> bool:
        is_cut = frozenset((source, host.name)) in self.cut
        is_lost = is_cut or (self.is_lossy and self._random.random() < 0.01)
        self.num_faults += is_lost
        return is_lost

    def _later(self, function: Callable[..., None], *args: Any, seconds: float = 0.02) -> None:
        seconds *= self._random.random()
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, function, *args, context=outside())


class SimulatedForwarding:
    """Passes requests on as `Forwarding` does, over the simulated network."""

    def __init__(self, network: Network, source: str) -> None:
        self._network = network
        self._source = source
        self._calls: dict[Call, None] = {}

    async def attempt(self, url: str, scope: Scope, body: Body, send: Send) -> Answered | None:
        whole = b"".join([piece async for piece in body.pieces()])
        path = scope["raw_path"].decode()
        headers = [pair for pair in scope["headers"] if pair[0] != HOP] + [(HOP, b"1")]
        call = self._network.call(self._source, url, Request(scope["method"], path, headers, whole))
        self._calls[call] = None
        leaving = asyncio.create_task(body.until_gone())
        try:
            await asyncio.wait([call.answered, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not call.answered.done():
                raise ClientGoneError
        finally:
            leaving.cancel()
            del self._calls[call]
            call.leave()
        answer = call.answered.result()
        if answer is None or answer.header(NOT_HERE):
            return None
        start = {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
        await send(start)
        await send({"type": "http.response.body", "body": answer.body})
        return Answered(answer.status, None)

    async def reaches(self, url: str) -> bool:
        return self._network.takes_connections(self._source, url)

    def drop(self, *, only_unanswered: bool = False) -> None:
        for call in list(self._calls):
            call.leave()


def _scope(request: Request) -> Scope:
    path, _, query = request.path.partition("?")
    return {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": request.headers,
        "server": ("server", 80),
        "client": ("client", 1),
    }
