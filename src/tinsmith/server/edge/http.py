"""Between HTTP and the handlers: bodies in, answers and refusals out.

A handler takes (service, caller, request) and returns a response, or raises: a `Refusal` with a
status, or a `ValidationError`, which is the client's mistake. The statuses matter: clients retry
408, 409, 429 and 5xx, so a mistake of theirs is never one of these, and every refusal has a body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tinsmith.errors import EngineError, TooLargeError, ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.connections import CONNECTION
from tinsmith.server.service import Service
from tinsmith.server.store.errors import StoreUnavailableError, StoreValueError
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import json, zstd
from tinsmith.wire.dialects import media_type
from tinsmith.wire.endpoints import API

logger = logging.getLogger(__name__)

ErrorBody = Callable[[int, str], Any]
T = TypeVar("T")

WAIT = {"retry-after-ms": "1000", "retry-after": "1"}
_UNFOLD_IN_THREAD_BYTES = 256 * 1024
_JOIN_IN_THREAD_BYTES = 1024 * 1024
"""From here on Python joins bytes without its lock."""

OWNER, HAS_DATA, _BODY_BYTES = "tinsmith.owner", "tinsmith.has_data", "tinsmith.body_bytes"
FOR_BROWSERS, _BODY_START = "tinsmith.for_browsers", "tinsmith.body_start"
KEY_OWNER = "tinsmith.key_owner"
"""What a request's scope holds for us: whose it is, whether its body may be large, the memory that
the body was given, whether a browser's cookie counts, and whose key or token it came with."""

COOKIE = "tinsmith_session"


_TRIES = "x-stainless-retry-count"
"""How often a client has tried before, by its own account."""

_SHORT_PAUSES, _LONGEST_PAUSE = 5, 32


def with_pause(asked: Headers, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers of a refusal; those that tell when to try again ask for more patience each time.

    The official client tries eleven times, as long apart as it is told. With a second each it gave
    up after ten, while a database was being started again; now the last tries are further apart,
    and together they last for a minute.
    """
    told = dict(headers or {})
    tries = asked.get(_TRIES, "")
    if tries.isdecimal() and told.keys() & WAIT.keys():
        seconds = min(2 ** max(0, int(tries[:2]) + 1 - _SHORT_PAUSES), _LONGEST_PAUSE)
        told |= {"retry-after-ms": str(1000 * seconds), "retry-after": str(seconds)}
    return told


class Refusal(Exception):
    """An answer other than success, raised where the reason is found."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers


def not_found(what: str, name: str) -> Refusal:
    """For what is not there and for what is somebody else's: the caller cannot tell which."""
    return Refusal(404, f"there is no {what} {name[:200]!r}")


def detail_body(status: int, detail: str) -> Any:
    return {"detail": detail}


def answer(message: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A message, or plain data, as JSON."""
    return Response(json.encode(message), status, headers, media_type=JSON)


def nothing() -> Response:
    return Response(status_code=204)


def name_connection(request: Request, caller: Caller) -> None:
    """Note whose request it is, and whose connection: of these an owner has a share, too."""
    request.scope[OWNER] = caller.owner
    connection = request.scope.get(CONNECTION)
    if connection is not None and not connection.name(caller.owner):
        raise Refusal(
            429,
            "you have too many connections; close some, then send this again",
            WAIT | {"connection": "close"},
        )


async def read_body(service: Service, request: Request) -> bytes:
    """The body, decompressed; refused before it is read when it announces too many bytes."""
    limit, cure = service.config.max_body_bytes, ""
    if not request.scope[HAS_DATA]:
        limit = min(limit, service.limits.max_control_bytes)
    elif media_type(request.headers.get("content-type", "")) != PROTOBUF:
        limit, cure = min(limit, service.limits.max_json_bytes), json.SMALLER
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdigit() else 0
    if size > limit:
        raise TooLargeError(f"the body has {announced} bytes; the limit is {limit}{cure}")
    _take_memory(service, request, size)
    parts: list[bytes] = []
    size = 0
    began = time.monotonic()
    while True:
        message = await _next_part(service, request, began, size)
        part = message.get("body", b"")
        request.scope.setdefault(_BODY_START, part)
        size += len(part)
        if size > limit:
            raise TooLargeError(f"the body is larger than the limit of {limit} bytes{cure}")
        _take_memory(service, request, size)
        parts.append(part)
        if not message.get("more_body", False):
            break
    if size > _JOIN_IN_THREAD_BYTES:
        body = await service.workers.run(request.scope[OWNER], b"".join, parts)
    else:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "zstd":
        size = zstd.unfolded_size(body, max_bytes=limit)
        _take_memory(service, request, len(body) + size)
        if size > _UNFOLD_IN_THREAD_BYTES:
            owner = request.scope[OWNER]
            return await service.workers.run(owner, zstd.decompress, body, max_bytes=limit)
        return zstd.decompress(body, max_bytes=limit)
    if encoding != "identity":
        raise ValidationError(
            f"bodies may be compressed with zstd only, not with {encoding[:40]!r}"
        )
    return body


async def _next_part(service: Service, request: Request, began: float, size: int) -> Any:
    """The next piece of a body of which `size` bytes came since `began`.

    Who sends more slowly than the least rate is not waited for.
    """
    connection = request.scope.get(CONNECTION)
    if connection is not None and connection.has_body:
        return await _received(request)
    config = service.config
    due = began + config.body_patience_seconds + size / config.min_body_bytes_per_second
    try:
        async with asyncio.timeout(due - time.monotonic()):
            return await _received(request)
    except TimeoutError:
        raise Refusal(
            400,
            f"the body came too slowly: {size} bytes in {time.monotonic() - began:.0f} seconds",
            {"connection": "close"},
        ) from None


async def _received(request: Request) -> Any:
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


def _take_memory(service: Service, request: Request, wanted: int) -> None:
    """Count a body's bytes as under way until its request is answered."""
    held = request.scope.get(_BODY_BYTES, 0)
    if wanted <= held:
        return
    if not service.admission.body_bytes.take(request.scope[OWNER], wanted - held):
        raise Refusal(429, "your requests under way hold too many bytes; send this again", WAIT)
    request.scope[_BODY_BYTES] = wanted


def _give_memory_back(service: Service, request: Request) -> None:
    held = request.scope.pop(_BODY_BYTES, 0)
    if held:
        service.admission.body_bytes.give_back(request.scope[OWNER], held)


async def check_still_known(service: Service, request: Request) -> None:
    """For answers that took their time: the key may have been revoked while its owner waited."""
    await known_caller(service, request)


async def while_known(
    service: Service, request: Request, events: AsyncGenerator[bytes, None], goodbye: bytes
) -> AsyncIterator[bytes]:
    """A stream's events for as long as the caller's key is good; then `goodbye` and no more."""
    async with aclosing(events):
        async for event in events:
            if await caller_of(service, request) is None:
                yield goodbye
                return
            yield event


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; cancelled when the client goes away. The body must have been read."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(gone(request))
    try:
        await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for other in (task, leaving):
            other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


@contextmanager
def leaving(request: Request) -> Iterator[asyncio.Future[None]]:
    """A future that is done when the client goes away. The body must have been read."""
    connection = request.scope.get(CONNECTION)
    if connection is not None:
        yield connection.lost
        return
    task = asyncio.create_task(gone(request))
    try:
        yield task
    finally:
        task.cancel()


async def gone(request: Request) -> None:
    """Returns when the client goes away. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def caller_of(service: Service, request: Request) -> Caller | None:
    """Who asks, by a key or a token; or by a browser's cookie, where the route takes one."""
    caller = await service.auth.caller(request.headers)
    if caller is not None:
        request.scope[KEY_OWNER] = caller.owner
    if caller is None and request.scope.get(FOR_BROWSERS) and COOKIE in request.cookies:
        if request.method != "GET" and not _is_own_page(request):
            raise Refusal(403, "a browser's cookie counts for requests of this server's own pages")
        caller = await service.browsers.caller(request.cookies[COOKIE])
    return caller


def _is_own_page(request: Request) -> bool:
    """Whether the browser says so. That `Origin` is this server has been checked for all routes."""
    site = request.headers.get("sec-fetch-site")
    return site == "same-origin" if site is not None else "origin" in request.headers


async def known_caller(service: Service, request: Request) -> Caller:
    caller = await caller_of(service, request)
    if caller is None:
        raise Refusal(
            401,
            "the API key is missing or not known to this server; `tinsmith key create` makes one",
        )
    return caller


async def body_start(service: Service, request: Request) -> bytes:
    """The first bytes of a body that was not taken; none of a compressed one."""
    if "content-encoding" in request.headers:
        return b""
    if _BODY_START not in request.scope:
        message = await _next_part(service, request, time.monotonic(), 0)
        request.scope[_BODY_START] = message.get("body", b"")
    start: bytes = request.scope[_BODY_START]
    return start


async def guarded(
    handler: Callable[[Service, Request], Awaitable[Response]], request: Request, errors: ErrorBody
) -> Response:
    service: Service = request.app.state.service
    try:
        return await handler(service, request)
    except Refusal as refusal:
        status, detail, headers = refusal.status, refusal.detail, refusal.headers
    except TooLargeError as error:
        status, detail, headers = 413, str(error), None
    except (ValidationError, StoreValueError) as error:
        status, detail, headers = 400, str(error), None
    except StoreUnavailableError as error:
        status, detail, headers = 503, str(error), WAIT
    except EngineError as error:
        status, detail, headers = 503, str(error), None
    except ClientDisconnect:
        return Response(status_code=400)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.url.path)
        status, detail, headers = 500, f"internal error: {type(error).__name__}", None
    finally:
        _give_memory_back(service, request)
    service.metrics.count("refusals", status=str(status))
    return answer(errors(status, detail), status, with_pause(request.headers, headers))


def moment(seconds: float) -> datetime:
    """Since 1970, as answers have it."""
    return datetime.fromtimestamp(seconds, UTC)


def query_int(request: Request, name: str, default: int, *, least: int = 0, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValidationError(f"expected a number, got {text[:40]!r}", name) from None
    if not least <= value <= most:
        raise ValidationError(f"must be between {least} and {most}, got {value}", name)
    return value


def signed_url(service: Service, path: str, expires: int) -> str:
    """A URL that anybody may fetch until `expires`."""
    signature = service.auth.sign_path(path, expires)
    return f"{service.url}{API}{path}?expires={expires}&signature={signature}"


def check_signature(service: Service, request: Request) -> None:
    path = request.scope["raw_path"].decode().removeprefix(API).partition("?")[0]
    query = request.query_params
    if not service.auth.is_signed(path, query.get("expires", ""), query.get("signature", "")):
        raise Refusal(403, "the URL has expired or its signature is wrong; ask for a new one")
