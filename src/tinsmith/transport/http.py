"""One HTTP request: the only module that names the HTTP library.

Each connection class has HTTP clients of its own ("lanes"). Over TLS the server may choose HTTP/2,
where a lane is one socket with many streams: a lane then takes a limited number of requests at a
time and further ones open another. Training requests use HTTP/1.1, so that each has a socket to
itself and a long upload delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urljoin

import pyqwest

from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    TinkerError,
    UnprocessableEntityError,
)
from tinsmith.transport import urls
from tinsmith.transport.base import SECRET_HEADERS, Request, Response
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.retry import is_bare_bad_request
from tinsmith.wire.endpoints import ConnectionClass

Pieces = AsyncIterator[bytes]

_MAX_REDIRECTS = 10
_STATUS_ERRORS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRules:
    """How the connections of a class are used."""

    http1_only: bool = False
    requests_per_lane: int = 50


CLASS_RULES = {kind: ClassRules() for kind in ConnectionClass} | {
    ConnectionClass.TRAIN: ClassRules(http1_only=True)
}


class Http:
    """The innermost transport: sends a request once and reads the whole answer."""

    opened: ClassVar[weakref.WeakSet[Http]] = weakref.WeakSet()
    """All that exist, so that the end of the process can close them."""

    def __init__(self, config: ClientConfig) -> None:
        self.opened.add(self)
        self._config = config
        self._lanes: dict[ConnectionClass, list[_Lane]] = {kind: [] for kind in ConnectionClass}
        self._is_closed = False

    async def send(self, request: Request) -> Response:
        for _ in range(_MAX_REDIRECTS):
            response = await self._exchange(request)
            if not 300 <= response.status_code < 400 or "location" not in response.headers:
                return _checked(response)
            request = _redirected(request, response)
        raise APIConnectionError(request, f"More than {_MAX_REDIRECTS} redirects.")

    @contextlib.asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[tuple[Response, Pieces]]:
        """The head of an answer (with an empty body) and its body as it arrives.

        The time limit of the request is for each piece, not for the whole.
        """
        for _ in range(_MAX_REDIRECTS):
            async with self._opened(request) as (head, pieces):
                if head.status_code < 300 or head.status_code == 304:
                    yield head, pieces
                    return
                response = replace(head, content=b"".join([piece async for piece in pieces]))
            if response.status_code >= 400 or "location" not in response.headers:
                _checked(response)
            request = _redirected(request, response)
        raise APIConnectionError(request, f"More than {_MAX_REDIRECTS} redirects.")

    @contextlib.asynccontextmanager
    async def _opened(self, request: Request) -> AsyncIterator[tuple[Response, Pieces]]:
        async with contextlib.AsyncExitStack() as stack:
            lane = self.take_lane(request.connection)
            stack.callback(self.leave_lane, lane, request.connection)
            with _translated(request):
                async with asyncio.timeout(request.timeout_seconds):
                    answer = await stack.enter_async_context(
                        lane.client.stream(
                            request.method, request.url, _headers(request), request.content
                        )
                    )
            head = Response(
                status_code=answer.status,
                headers=dict(answer.headers.items()),
                content=b"",
                request=request,
            )
            yield head, _pieces(answer.content, request)

    async def close(self) -> None:
        self._is_closed = True
        lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        for known in self._lanes.values():
            known.clear()
        for lane in lanes:
            await lane.transport.aclose()

    async def _exchange(self, request: Request) -> Response:
        lane = self.take_lane(request.connection)
        try:
            async with asyncio.timeout(request.timeout_seconds):
                answer = await lane.client.execute(
                    request.method, request.url, _headers(request), request.content
                )
        except _LIBRARY_ERRORS as error:
            raise _translate(error, request) from error
        finally:
            self.leave_lane(lane, request.connection)
        response = Response(
            status_code=answer.status,
            headers=dict(answer.headers.items()),
            content=answer.content,
            request=request,
        )
        if response.status_code == 400 and not response.content:
            # A proxy refused what this socket sends: the next attempt gets a new one.
            lane.is_spoilt = True
            self._drop_if_spoilt(lane, request.connection)
        return response

    def take_lane(self, kind: ConnectionClass) -> _Lane:
        if self._is_closed:
            raise TinkerError("the client is closed; create a new one")
        rules = CLASS_RULES[kind]
        lanes = self._lanes[kind]
        # In HTTP/1.1 a lane opens a socket for each request by itself.
        many = rules.http1_only or self._config.base_url.startswith("http:")
        limit = None if many else rules.requests_per_lane
        lane = next((each for each in lanes if each.has_room(limit)), None)
        if lane is None:
            lane = _Lane(_http_transport(self._config, http1_only=rules.http1_only))
            lanes.append(lane)
        lane.active += 1
        return lane

    def leave_lane(self, lane: _Lane, kind: ConnectionClass) -> None:
        lane.active -= 1
        self._drop_if_spoilt(lane, kind)

    def _drop_if_spoilt(self, lane: _Lane, kind: ConnectionClass) -> None:
        if lane.is_spoilt and lane in self._lanes[kind]:
            self._lanes[kind].remove(lane)


class _Lane:
    """One HTTP client of the library, and how many requests it carries now."""

    def __init__(self, transport: pyqwest.HTTPTransport) -> None:
        self.transport = transport
        self.client = pyqwest.Client(transport)
        self.active = 0
        self.is_spoilt = False

    def has_room(self, limit: int | None) -> bool:
        return not self.is_spoilt and (limit is None or self.active < limit)


def _http_transport(config: ClientConfig, *, http1_only: bool) -> pyqwest.HTTPTransport:
    options: dict[str, Any] = {}  # the library's keyword arguments
    if config.base_url.startswith("https:"):
        options["tls_include_system_certs"] = True
        if config.ca_file is not None:
            try:
                options["tls_ca_cert"] = config.ca_file.read_bytes()
            except OSError as error:
                raise TinkerError(
                    f"cannot read the certificates in {str(config.ca_file)!r}: {error.strerror}"
                ) from error
        if http1_only:
            options["http_version"] = pyqwest.HTTPVersion.HTTP1
    if config.proxies:
        options["proxy"] = [
            pyqwest.Proxy(rule.url, no_proxy=rule.no_proxy, scheme=rule.scheme)  # type: ignore[arg-type]  # the library's literal
            for rule in config.proxies
        ]
    return pyqwest.HTTPTransport(
        connect_timeout=config.connect_timeout_seconds,
        pool_max_idle_per_host=1000,
        enable_brotli=False,
        use_system_dns=True,
        follow_redirects=False,
        enable_otel=config.tracing,
        **options,
    )


def _headers(request: Request) -> Mapping[str, str]:
    if request.content is None and request.method in ("POST", "PUT", "PATCH"):
        # Some proxies refuse a body whose length is not given, even if there is none.
        return {**request.headers, "Content-Length": "0"}
    return request.headers


async def _pieces(content: AsyncIterator[Any], request: Request) -> Pieces:
    iterator = aiter(content)
    while True:
        with _translated(request):
            async with asyncio.timeout(request.timeout_seconds):
                try:
                    piece = await anext(iterator)
                except StopAsyncIteration:
                    return
        yield bytes(piece)


_LIBRARY_ERRORS = (
    OSError,  # connections and time limits
    pyqwest.RemoteProtocolError,
    pyqwest.ReadError,
    pyqwest.WriteError,
)


def _translate(error: BaseException, request: Request) -> APIConnectionError:
    """The library's errors as ours."""
    if isinstance(error, TimeoutError):
        return APITimeoutError(request)
    return APIConnectionError(request, f"Connection error: {error}")


@contextlib.contextmanager
def _translated(request: Request) -> Iterator[None]:
    try:
        yield
    except _LIBRARY_ERRORS as error:
        raise _translate(error, request) from error


def _checked(response: Response) -> Response:
    if response.status_code < 400:
        return response
    body: object
    try:
        body = response.json()
        message = f"Error code: {response.status_code} - {_reason(body)}"
    except ValueError:
        body = response.text
        message = response.text.strip() or f"Error code: {response.status_code}"
    fallback = InternalServerError if response.status_code >= 500 else APIStatusError
    error = _STATUS_ERRORS.get(response.status_code, fallback)(message, response, body)
    if is_bare_bad_request(error):
        error.message = "Error code: 400 without a body, probably from a proxy"
    raise error


def _reason(body: object) -> object:
    """What an error's body says, without the braces around it."""
    if isinstance(body, dict) and isinstance(body.get("detail"), str):
        return body["detail"]
    return body


def _redirected(request: Request, response: Response) -> Request:
    target = urljoin(request.url, response.headers["location"])
    keeps_method = response.status_code in (307, 308) or request.method in ("GET", "HEAD")
    if not keeps_method:
        raise APIStatusError(
            f"{request.method} {request.url} was redirected to {target} with status "
            f"{response.status_code}, which would drop its body; use the new address as base URL.",
            response,
            None,
        )
    headers = request.headers
    if urls.origin(target) != urls.origin(request.url):
        headers = {k: v for k, v in headers.items() if k.lower() not in SECRET_HEADERS}
    return replace(request, url=target, headers=headers)
