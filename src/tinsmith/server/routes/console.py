"""For the console: signing browsers in, live events, the account and the server at a glance."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Literal, cast

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from tinsmith.errors import ValidationError
from tinsmith.server.console.browsers import SESSION_SECONDS
from tinsmith.server.console.queue import standing
from tinsmith.server.edge.auth import TOKEN_PREFIX, Caller, credential_in
from tinsmith.server.edge.http import (
    COOKIE,
    HAS_DATA,
    OWNER,
    Refusal,
    caller_of,
    not_found,
    nothing,
    read_body,
)
from tinsmith.server.edge.routing import bare_route, open_route
from tinsmith.server.routes.account import audit
from tinsmith.server.service import Service
from tinsmith.types.observing import (
    ConsoleKey,
    ConsoleKeysResponse,
    ConsoleLoginRequest,
    ConsoleServerResponse,
    ConsoleUsageItem,
    ConsoleUsageResponse,
    RunInQueue,
)
from tinsmith.types.protocol import EVENT_STREAM
from tinsmith.wire import dialects, endpoints

_USAGE_FIELDS = {
    "training": "training_tokens",
    "sampling_prefill": "prefill_tokens",
    "sampling_prefill_cached": "cached_prefill_tokens",
    "sampling_sample": "sampled_tokens",
}
_BY = ("run", "model", "day")


async def login(service: Service, request: Request) -> Response:
    request.scope[OWNER], request.scope[HAS_DATA] = "", False
    body = await read_body(service, request)
    message = dialects.decode(ConsoleLoginRequest, body, service.limits)
    if message.key.startswith(TOKEN_PREFIX):
        # A cookie lasts longer than a token, and may revoke keys.
        raise Refusal(403, "a token signs no browser in; send the key that it was made from")
    caller = await service.auth.resolve(message.key)
    if caller is None:
        raise Refusal(401, "this key is not known to this server, or was revoked")
    return _with_cookie(service, nothing(), await service.browsers.let_in(caller))


async def follow_login_link(service: Service, request: Request) -> Response:
    cookie = await service.browsers.follow_link(request.query_params.get("token", ""))
    if cookie is None:
        return RedirectResponse("/login?reason=link", 303)  # the page says what to do instead
    return _with_cookie(service, RedirectResponse("/", 303), cookie)


async def logout(service: Service, request: Request) -> Response:
    if COOKIE in request.cookies:
        await service.browsers.send_away(request.cookies[COOKIE])
    response = nothing()
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def _with_cookie(service: Service, response: Response, cookie: str) -> Response:
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=service.url.startswith("https:"),
    )
    return response


async def events(service: Service, caller: Caller, request: Request) -> Response:
    run = request.query_params.get("run")
    if run is not None:
        model = await service.store.models.get(run)
        if model is None or model.owner != caller.owner:
            raise not_found("training run", run)
    last = request.headers.get("last-event-id")
    if last is not None and not (last.isascii() and last.isdigit() and len(last) < 19):
        raise ValidationError(f"expected the id of an event, got {last[:40]!r}", "Last-Event-ID")
    after = None if last is None else int(last)
    seconds = service.config.event_stream_seconds
    stream = service.events.stream(caller.owner, run, after, seconds)
    return StreamingResponse(_while_welcome(service, request, stream), media_type=EVENT_STREAM)


async def _while_welcome(
    service: Service, request: Request, stream: AsyncGenerator[bytes, None]
) -> AsyncIterator[bytes]:
    """The stream, for as long as its reader's key or cookie is good."""
    async with aclosing(stream):
        async for news in stream:
            if await caller_of(service, request) is None:
                yield b'event: goodbye\ndata: {"reason": "the key was revoked"}\n\n'
                return
            if news:
                yield news


async def usage(service: Service, caller: Caller, request: Request) -> ConsoleUsageResponse:
    by = request.query_params.get("by", "run")
    if by not in _BY:
        raise ValidationError(f"must be one of {', '.join(_BY)}, got {by[:40]!r}", "by")
    await service.usage.flush()
    rows: dict[str, dict[str, int]] = {}
    for name, kind, count in await service.store.account.usage_by(
        caller.owner, cast("Literal['run', 'model', 'day']", by)
    ):
        rows.setdefault(name, {})[_USAGE_FIELDS[kind]] = count
    if by == "run":
        for name, size in await service.store.checkpoints.storage_by_run(caller.owner):
            rows.setdefault(name, {})["stored_bytes"] = size
    if by == "day":
        rows = {_day(int(name)): counts for name, counts in rows.items()}
    return ConsoleUsageResponse(usage=[ConsoleUsageItem(by=n, **c) for n, c in rows.items()])


def _day(number: int) -> str:
    return (datetime.fromtimestamp(0, UTC) + timedelta(days=number)).date().isoformat()


async def server(service: Service, caller: Caller, request: Request) -> ConsoleServerResponse:
    engines = service.engines
    capabilities = engines.capabilities
    own = [model for model in service.models if model.owner == caller.owner]
    return ConsoleServerResponse(
        version=version("tinsmith"),
        url=service.url,
        started=service.started_at,
        status=service.trouble or "ready",
        device=capabilities.device if capabilities else "",
        memory_bytes=engines.health.memory_bytes,
        restarts=engines.num_restarts,
        running_samples=service.sampling.num_running,
        storage=(service.config.storage or "").partition(":")[0],
        epoch=service.epoch,
        on_policy=service.config.on_policy,
        models=[model.name for model in capabilities.models] if capabilities else [],
        refused_models=[{"name": m.name, "reason": m.reason} for m in service.refused_models],
        queues=[
            RunInQueue(run=m.model_id, is_running=m.is_busy, **standing(service, m).model_dump())
            for m in own
            if len(m.queue) or m.is_busy
        ],
    )


async def keys(service: Service, caller: Caller, request: Request) -> ConsoleKeysResponse:
    return ConsoleKeysResponse(
        keys=[
            ConsoleKey(
                key_id=key.key_id,
                name=key.name,
                note=key.note,
                created=key.created_at,
                expires=key.expires_at,
                revoked=key.revoked_at,
                is_current=key.key_id == caller.key_id,
            )
            for key in await service.store.keys.list()
            if key.owner == caller.owner
        ]
    )


async def revoke_key(service: Service, caller: Caller, request: Request) -> None:
    if (credential_in(request.headers) or "").startswith(TOKEN_PREFIX):
        raise Refusal(403, "a token cannot revoke keys; send a key")
    given = request.path_params["key_id"]
    owned = {
        str(key.key_id): key
        for key in await service.store.keys.list()
        if key.owner == caller.owner and key.revoked_at is None
    }
    if given not in owned:
        raise not_found("key", given)
    await service.store.keys.revoke(owned[given].key_id, time.time())
    service.auth.forget_keys()
    service.events.changed(caller.owner, "key", {"key_id": owned[given].key_id})


ROUTES = [
    open_route(endpoints.CONSOLE_LOGIN, login),
    open_route(endpoints.CONSOLE_LOGIN_LINK, follow_login_link),
    open_route(endpoints.CONSOLE_LOGOUT, logout),
    bare_route(endpoints.CONSOLE_EVENTS, events),
    bare_route(endpoints.CONSOLE_USAGE, usage),
    bare_route(endpoints.CONSOLE_SERVER, server),
    bare_route(endpoints.CONSOLE_KEYS, keys),
    bare_route(endpoints.REVOKE_KEY, revoke_key),
    bare_route(endpoints.CONSOLE_AUDIT, audit),
]
