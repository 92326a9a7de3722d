"""Between HTTP and the handlers: bodies in, answers and refusals out.

A handler takes (service, caller, request) and returns a response, or raises: a `Refusal` with a
status, or a `ValidationError`, which is the client's mistake. The statuses matter: clients retry
408, 409, 429 and 5xx, so a mistake of theirs is never one of these, and every refusal has a body.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.errors import EngineError, TooLargeError, ValidationError
from tinsmith.server.auth import Caller
from tinsmith.server.service import Service
from tinsmith.server.store.base import StoreUnavailableError
from tinsmith.wire import json, zstd

logger = logging.getLogger(__name__)

API = "/api/v1"

Handler = Callable[[Service, Caller, Request], Awaitable[Response]]
OpenHandler = Callable[[Service, Request], Awaitable[Response]]
ErrorBody = Callable[[int, str], Any]


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


class ApiRoute(Route):
    """A route that knows which messages it takes and gives, for the description of the API."""

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        handler: Callable[..., Awaitable[Response]],
        *,
        takes: type | None,
        gives: type | None,
        is_open: bool,
    ) -> None:
        super().__init__(path, endpoint, methods=[method], name=handler.__name__)
        self.method = method
        self.takes = takes
        self.gives = gives
        self.is_open = is_open
        self.summary = (handler.__doc__ or "").strip().partition("\n")[0]


def route(
    method: str,
    path: str,
    handler: Handler,
    *,
    takes: type | None = None,
    gives: type | None = None,
    prefix: str = API,
    errors: ErrorBody = detail_body,
) -> ApiRoute:
    """A route whose callers must say who they are."""

    async def endpoint(request: Request) -> Response:
        async def authorised(service: Service, request: Request) -> Response:
            caller = await service.auth.caller(request.headers)
            if caller is None:
                raise Refusal(401, "the API key is missing or not known to this server")
            return await handler(service, caller, request)

        return await _answer(authorised, request, errors)

    return ApiRoute(
        method, prefix + path, endpoint, handler, takes=takes, gives=gives, is_open=False
    )


def open_route(
    method: str,
    path: str,
    handler: OpenHandler,
    *,
    gives: type | None = None,
    prefix: str = API,
) -> ApiRoute:
    """A route for everybody."""

    async def endpoint(request: Request) -> Response:
        return await _answer(handler, request, detail_body)

    return ApiRoute(method, prefix + path, endpoint, handler, takes=None, gives=gives, is_open=True)


def answer(message: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A message, or plain data, as JSON."""
    return Response(json.encode(message), status, headers, media_type="application/json")


def nothing() -> Response:
    return Response(status_code=204)


async def read_body(service: Service, request: Request) -> bytes:
    """The body, decompressed; refused before it is read when it announces too many bytes."""
    limit = service.config.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise TooLargeError(f"the body has {announced} bytes; the limit is {limit}")
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLargeError(f"the body is larger than the limit of {limit} bytes")
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "zstd":
        return zstd.decompress(body, max_bytes=limit)
    if encoding != "identity":
        raise ValidationError(
            f"bodies may be compressed with zstd only, not with {encoding[:40]!r}"
        )
    return body


async def body_start(request: Request) -> bytes:
    """The first bytes of a body that is not going to be read; none when some were read already."""
    try:
        async for part in request.stream():
            return part
    except RuntimeError:
        pass
    return b""


async def _answer(
    handler: Callable[[Service, Request], Awaitable[Response]], request: Request, errors: ErrorBody
) -> Response:
    service: Service = request.app.state.service
    try:
        return await handler(service, request)
    except Refusal as refusal:
        status, detail, headers = refusal.status, refusal.detail, refusal.headers
    except TooLargeError as error:
        status, detail, headers = 413, str(error), None
    except ValidationError as error:
        status, detail, headers = 400, str(error), None
    except (EngineError, StoreUnavailableError) as error:
        status, detail, headers = 503, str(error), None
    except ClientDisconnect:
        return Response(status_code=400)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.url.path)
        status, detail, headers = 500, f"internal error: {type(error).__name__}", None
    service.metrics.count("refusals", status=str(status))
    return answer(errors(status, detail), status, headers)


def query_int(request: Request, name: str, default: int, *, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValidationError(f"expected a number, got {text[:40]!r}", name) from None
    if not 0 <= value <= most:
        raise ValidationError(f"must be between 0 and {most}, got {value}", name)
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
