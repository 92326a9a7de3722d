"""From rows of the endpoint table to routes: who asks, what they say, and what they are told.

A handler gets the message that its row names and returns the one that its row promises, or a
response of its own. Large bodies are decoded, and answers that can be long are encoded, in a
thread: the event loop serves everybody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import (
    FOR_BROWSERS,
    HAS_DATA,
    OWNER,
    WAIT,
    ErrorBody,
    Refusal,
    answer,
    detail_body,
    guarded,
    known_caller,
    name_connection,
    nothing,
    read_body,
)
from tinsmith.server.edge.owners import working_for
from tinsmith.server.service import Service
from tinsmith.types.model import Model
from tinsmith.wire import dialects, json
from tinsmith.wire.endpoints import Endpoint

Req = TypeVar("Req")
Resp = TypeVar("Resp")

IN_THREAD_BYTES = 64 * 1024
"""Bodies from here on are decoded in a thread."""


class ApiRoute(Route):
    """A route that knows its row."""

    def __init__(
        self, row: Endpoint[Any, Any], respond: Callable[[Request], Awaitable[Response]]
    ) -> None:
        super().__init__(row.full_path, respond, methods=[row.method], name=row.full_path)
        self.row = row
        self.respond = respond


def route(
    row: Endpoint[Req, Resp],
    handler: Callable[[Service, Caller, Request, Req], Awaitable[Resp | Response]],
    *,
    errors: ErrorBody = detail_body,
) -> ApiRoute:
    """For a handler that takes a message."""

    async def handle(service: Service, caller: Caller, request: Request) -> Response:
        message = await _read(service, request, row.request)
        return await _encoded(row, await handler(service, caller, request, message))

    return _authorised(row, handle, errors)


def bare_route(
    row: Endpoint[Any, Resp],
    handler: Callable[[Service, Caller, Request], Awaitable[Resp | Response]],
    *,
    errors: ErrorBody = detail_body,
) -> ApiRoute:
    """For a handler that takes no message, or reads the body itself."""

    async def handle(service: Service, caller: Caller, request: Request) -> Response:
        return await _encoded(row, await handler(service, caller, request))

    return _authorised(row, handle, errors)


def open_route(
    row: Endpoint[None, Resp], handler: Callable[[Service, Request], Awaitable[Resp | Response]]
) -> ApiRoute:
    """For a handler that does not ask who the caller is."""
    assert row.access != "key", f"{row.path} is for callers with a key"

    async def handle(service: Service, request: Request) -> Response:
        return await _encoded(row, await handler(service, request))

    async def respond(request: Request) -> Response:
        return await guarded(handle, request, detail_body)

    return ApiRoute(row, respond)


def _authorised(
    row: Endpoint[Any, Any],
    handle: Callable[[Service, Caller, Request], Awaitable[Response]],
    errors: ErrorBody,
) -> ApiRoute:
    assert row.access == "key", f"{row.path} is open"

    async def authorised(service: Service, request: Request) -> Response:
        request.scope[FOR_BROWSERS] = row.method == "GET" or row.is_for_browsers
        caller = await known_caller(service, request)
        name_connection(request, caller)
        # Unknown callers, who are refused above, make no spans.
        with service.spans.request(row.method, row.full_path, request.headers) as span:
            with working_for(caller.owner):
                response = await admitted(service, caller, request)
            if span is not None:
                span.set_attribute("http.response.status_code", response.status_code)
            return response

    async def admitted(service: Service, caller: Caller, request: Request) -> Response:
        request.scope[HAS_DATA] = row.has_data
        is_too_fast = service.admission.is_too_fast(caller.owner)
        if is_too_fast:
            # A client that ignores refusals would send the next one at once; the delay prevents
            # that.
            await asyncio.sleep(service.admission.penalty_seconds * (1 + 2 * random.random()))
        if not row.is_counted:
            return await handle(service, caller, request)
        if is_too_fast or not service.admission.enter(caller.owner):
            raise Refusal(429, "too many of your requests are under way; send this one again", WAIT)
        try:
            return await handle(service, caller, request)
        finally:
            service.admission.leave(caller.owner)

    async def respond(request: Request) -> Response:
        return await guarded(authorised, request, errors)

    return ApiRoute(row, respond)


async def _read(service: Service, request: Request, kind: type[Req]) -> Req:
    body = await read_body(service, request)
    if len(body) < IN_THREAD_BYTES:
        return _decode(kind, body, service)
    return await service.workers.run(request.scope[OWNER], _decode, kind, body, service)


def _decode(kind: type[Req], body: bytes, service: Service) -> Req:
    if issubclass(kind, Model):
        return dialects.decode(kind, body, service.limits)
    assert kind is dict, f"{kind} cannot be read"
    message: Any = json.parse(body, service.limits)
    return message  # type: ignore[no-any-return]  # a dict, as asserted


async def _encoded(row: Endpoint[Any, Any], result: object) -> Response:
    if isinstance(result, Response):
        return result
    if result is None:
        return nothing()
    if row.is_long:
        return await asyncio.to_thread(answer, result)
    return answer(result)
