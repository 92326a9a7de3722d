"""`RemoteEngine`: the engine interface where the engine is at the other end of a channel.

Each call becomes a `Request` with a number of its own, and its answers find their way back by
that number. Calls are sent when they are made, so their order is the caller's. What lies behind
the channel, a process of ours or a machine elsewhere, is for a subclass to know.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from tinsmith.engine.base import Engine
from tinsmith.engine.calls import CALLS, Call
from tinsmith.engine.local.boundary.frames import Channel, Packed
from tinsmith.engine.local.boundary.messages import (
    Abandon,
    Done,
    Item,
    Reply,
    Request,
    Result,
    Start,
    Trouble,
)
from tinsmith.errors import EngineDiedError, EngineError

Replies = asyncio.Queue[Reply | EngineError]


class RemoteEngine(Engine):
    """Calls raise `EngineDiedError` once the channel is closed, and `EngineError` when a request
    failed for a reason that is not the caller's. Closing a stream early gives up the rest of it.
    """

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._closed: str | None = None
        """Why no further call can be made."""

        self._numbers = itertools.count(1)
        self._pending: dict[int, Replies] = {}

    async def connect(self, sock: socket.socket, start: Start) -> None:
        """Take over a connected socket; returns when the engine behind it is ready for calls."""
        sock.setblocking(False)
        await self.take(await Channel.open(sock, self), start)

    async def take(self, channel: Channel, start: Start) -> None:
        """Take over an open channel; returns when the engine behind it is ready for calls."""
        self._channel = channel
        channel.receiver = self
        if channel.is_lost:
            self.channel_lost(None)
        await self._ask(start)

    async def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    async def _ask(self, message: Request | Start) -> Any:
        number, replies = self._open(message)
        try:
            reply = await replies.get()
        finally:
            self._pending.pop(number, None)
        if isinstance(reply, Result):
            return reply.value
        raise _as_error(reply)

    def _stream(self, request: Request) -> AsyncIterator[Any]:
        # Sent now and not at the first step of the iteration: calls keep their order.
        return self._results(*self._open(request))

    async def _results(self, number: int, replies: Replies) -> AsyncIterator[Any]:
        try:
            while isinstance(reply := await replies.get(), Item):
                value = reply.value
                yield await asyncio.to_thread(value.open) if isinstance(value, Packed) else value
            if not isinstance(reply, Done):
                raise _as_error(reply)
        finally:
            # Still there: the other end has not sent its last answer.
            if self._pending.pop(number, None) is not None and self._closed is None:
                self._send(Abandon(number))

    def _request(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        return Request(next(self._numbers), call.name, call.arguments(*args, **kwargs))

    def _open(self, message: Request | Start) -> tuple[int, Replies]:
        if self._closed is not None:
            raise EngineDiedError(self._closed)
        number = message.number if isinstance(message, Request) else 0
        replies: Replies = asyncio.Queue()
        self._send(message)
        self._pending[number] = replies
        return number, replies

    def _send(self, message: Request | Abandon | Start) -> None:
        assert self._channel is not None, "the channel is opened before the first call"
        self._channel.send(message)

    def channel_lost(self, error: Exception | None) -> None:
        self._end("the connection to the engine was closed" if error is None else str(error))

    def _end(self, reason: str) -> None:
        """Nothing more will come: everyone who still waits is told."""
        self._closed = reason
        pending, self._pending = self._pending, {}
        for replies in pending.values():
            replies.put_nowait(EngineDiedError(reason))

    def message_received(self, message: list[Reply]) -> None:
        for reply in message:
            replies = self._pending.get(reply.number)
            if replies is None:
                continue
            replies.put_nowait(reply)
            if not isinstance(reply, Item):
                del self._pending[reply.number]


def _sent(call: Call) -> Callable[..., Any]:
    """A method that sends the call, with the declaration's signature and documentation."""

    async def ask(self: RemoteEngine, *args: Any, **kwargs: Any) -> Any:
        return await self._ask(self._request(call, args, kwargs))

    def stream(self: RemoteEngine, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._stream(self._request(call, args, kwargs))

    return functools.wraps(getattr(Engine, call.name))(stream if call.is_stream else ask)


for _call in CALLS.values():
    setattr(RemoteEngine, _call.name, _sent(_call))


def _as_error(reply: Reply | EngineError) -> EngineError:
    if isinstance(reply, EngineError):
        return reply
    assert isinstance(reply, Trouble), f"{type(reply).__name__} is not how this call can end"
    return EngineError(reply.text)
