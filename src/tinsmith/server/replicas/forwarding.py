"""Passing a request on to the server that holds the lease, and its answer back.

All of it goes on as it came, the caller's credentials too: the other server decides. What did not
get an answer is sent again, there or to whoever holds the lease next. Clients that lose a
connection do the same, so every request can be repeated. Once an answer has begun it is passed on
to its end, or the client's connection is cut with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from starlette.types import Message, Scope, Send

from tinsmith.server.edge.answer_headers import FIXED_HEADERS
from tinsmith.server.edge.auth import hash_key
from tinsmith.server.edge.connections import CONNECTION
from tinsmith.server.edge.http import KEY_OWNER
from tinsmith.server.replicas.body import Body, ClientGoneError
from tinsmith.server.replicas.upstream import Headers, Link, Upstream

HOP = b"x-tinsmith-hop"
"""On requests that were passed on once: they are not passed on again."""

NOT_HERE = b"x-tinsmith-not-here"
"""On the answer of a server that was taken for the holder and is not."""

_WHOSE = b"x-tinsmith-owner"
"""On the answer to a request that was passed on: a name for the owner of its key or token, where
that is good. No status says so: a page for everybody is answered without a look at it."""

_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect")
)
_MADE_ANEW = frozenset((b"date", b"server", *(name.encode() for name in FIXED_HEADERS)))
"""Headers that this server puts on every answer itself."""


class Answered(NamedTuple):
    status: int
    owner: str | None
    """A name for the owner of the request's key or token, if it was looked at and is good."""


class Forwarding:
    def __init__(self) -> None:
        self._upstream = Upstream()

    async def attempt(self, url: str, scope: Scope, body: Body, send: Send) -> Answered | None:
        """Pass a request on; how it was answered, or None if it was not."""
        try:
            async with self._upstream.link(url) as link:
                return await self._exchange(link, scope, body, send)
        except OSError:
            return None

    async def reaches(self, url: str) -> bool:
        """Whether anybody takes connections there."""
        try:
            await self._upstream.reach(url)
        except OSError:
            return False
        return True

    def drop(self, *, only_unanswered: bool = False) -> None:
        """End the exchanges under way, or those of them that have no answer yet."""
        self._upstream.drop(only_unanswered=only_unanswered)

    async def _exchange(self, link: Link, scope: Scope, body: Body, send: Send) -> Answered | None:
        is_chunked = _has(scope["headers"], b"transfer-encoding")
        sending = asyncio.create_task(_send_request(link, scope, body, is_chunked=is_chunked))
        try:
            try:
                status = await link.head()
            except OSError:
                _check_client(sending)
                raise
            if _has(link.headers, NOT_HERE):
                return None
            owner = dict(link.headers).get(_WHOSE)
            await _pass_back(link, status, scope, send)
        finally:
            is_sent = sending.done()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, ClientGoneError):
                await sending
            if not is_sent and not body.is_whole:
                link.abort()
        return Answered(status, None if owner is None else owner.decode("latin-1"))


def saying_whose(scope: Scope, send: Send) -> Send:
    """For the holder: tell the server that passed a request on whose it is."""
    if not _has(scope["headers"], HOP):
        return send

    async def send_headed(message: Message) -> None:
        owner = scope.get(KEY_OWNER)
        if message["type"] == "http.response.start" and owner is not None:
            name = (_WHOSE, hash_key(owner).encode())
            message["headers"] = [*message.get("headers", []), name]
        await send(message)

    return send_headed


async def _send_request(link: Link, scope: Scope, body: Body, *, is_chunked: bool) -> None:
    """Send it, and then see whether the client stays; if not, end the connection."""
    try:
        await link.write(_request_head(scope))
        async for piece in body.pieces():
            if piece and is_chunked:
                await link.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            elif piece:
                await link.write(piece)
        if is_chunked:
            await link.write(b"0\r\n\r\n")
        await body.until_gone()
        raise ClientGoneError
    except BaseException as error:
        if not isinstance(error, asyncio.CancelledError):
            link.abort()
        raise


def _check_client(sending: asyncio.Task[None]) -> None:
    """Raise if there is no answer because the client has gone."""
    if sending.done() and not sending.cancelled():
        error = sending.exception()
        if isinstance(error, ClientGoneError):
            raise error


async def _pass_back(link: Link, status: int, scope: Scope, send: Send) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": _passed_on(link.headers, _MADE_ANEW | {_WHOSE, b"transfer-encoding"}),
        }
    )
    if scope["method"] == "HEAD":
        await send({"type": "http.response.body", "body": b""})
        link.abort()
        return
    try:
        async for piece in link.body():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except OSError:
        # Half an answer must not look like a whole one.
        scope[CONNECTION].abort()
        await asyncio.sleep(0)
        return
    await send({"type": "http.response.body", "body": b""})


def _request_head(scope: Scope) -> bytes:
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % pair for pair in _passed_on(scope["headers"], {HOP})]
    return b"\r\n".join([*lines, HOP + b": 1", b"", b""])


def _passed_on(headers: Iterable[tuple[bytes, bytes]], without: Iterable[bytes]) -> Headers:
    left_out = _OF_ONE_CONNECTION | set(without)
    return [(name, value) for name, value in headers if name not in left_out]


def _has(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bool:
    return any(name == wanted for name, _ in headers)
