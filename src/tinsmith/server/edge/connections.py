"""uvicorn's HTTP connections, with bounds on what is not a request yet, or no longer.

The head of a request has a limit in bytes and in seconds, and so has whatever else is not a body
(trailers, blank lines). A body whose request was answered without it is not taken for ever. And
when a connection is lost, everything that was asked on it hears so, not only the newest request:
clients may send several without waiting, and go.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.server.edge.sockets import Sockets

MAX_HEAD_BYTES = 16 * 1024
"""Most bytes of a head; up to twice as many where it comes in one piece with others."""

CONNECTION = "tinsmith.connection"
"""Where a request's scope has its connection."""

_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, sockets: Sockets, head_seconds: float, **options: Any) -> None:
        """The rest is as uvicorn calls it; it calls nothing by position that we would have to name.

        `head_seconds` is how long a client may take for a head, from connecting or from its
        first byte, and for the rest of a body that nobody wants any more.
        """
        super().__init__(*args, **options)
        self._sockets = sockets
        self._head_seconds = head_seconds
        self._running: Any = None  # the request that is being answered; others may be queued
        self._patience: asyncio.TimerHandle | None = None
        self._bare_bytes = 0  # since there was last any progress: a head, a part of a body
        self._is_in_head = False
        self._lost: asyncio.Future[None] = self.loop.create_future()

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def has_body(self) -> bool:
        """Whether all of the body of the present request has come."""
        return self._running is not None and not self._running.more_body

    @property
    def lost(self) -> asyncio.Future[None]:
        """Done when the connection is lost."""
        self.flow.resume_reading()  # paused while requests are ahead: nobody would notice
        return self._lost

    def abort(self) -> None:
        self.transport.abort()

    def name(self, owner: str) -> bool:
        """The present request is this owner's; false if the owner has too many connections."""
        return self._sockets.named(self, owner)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sockets.opened(self, self.client[0] if self.client else "")
        self._lose_patience_later()

    def data_received(self, data: bytes) -> None:
        # In small pieces, because the parser joins the pieces of a header with those before.
        for start in range(0, len(data), MAX_HEAD_BYTES):
            piece = data[start : start + MAX_HEAD_BYTES]
            self._bare_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._bare_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
                return
        if self._patience is None and (self._is_in_head or not self.is_busy):
            self._lose_patience_later()

    def on_message_begin(self) -> None:
        self._bare_bytes = 0
        self._is_in_head = True
        self._be_patient()  # anew from here on, unless the whole head is there
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # a key of ours

    def on_headers_complete(self) -> None:
        self._bare_bytes = 0
        self._is_in_head = False
        self._be_patient()
        self._sockets.heard(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bare_bytes = 0
        self._be_patient()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._running is not None and self._running.more_body:
            self._lose_patience_later()
        super().on_response_complete()

    def shutdown(self) -> None:
        if self.is_busy and self._running.more_body:
            self.transport.abort()  # the rest of a body may never come
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        self._sockets.closed(self)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        if not self._lost.done():
            self._lost.set_result(None)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.transport = _Answering(self.transport, cycle, self.loop)
        super()._start_asgi_task(cycle, app)

    def _refuse_head(self) -> None:
        if self.is_busy:  # an answer is being written: nothing may come between
            self.transport.abort()
        else:
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def _lose_patience_later(self) -> None:
        self._be_patient()
        self._patience = self.loop.call_later(self._head_seconds, self.transport.abort)

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Answering:
    """A connection's transport for one answer, of which the head leaves together with the first of
    the body: in one packet, and with one call of the system, which costs as much as making it."""

    def __init__(
        self, transport: asyncio.Transport, cycle: Any, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        # Weak: the two would keep each other, and a body, until the next search for garbage.
        self._cycle = weakref.ref(cycle)
        self._loop = loop
        self._has_begun = False
        self._head = b""

    def write(self, data: bytes) -> None:
        cycle = self._cycle()
        if self._has_begun or cycle is None or not cycle.response_started:
            self._transport.writelines([self._head, data])
            self._head = b""
            return
        self._has_begun = True
        self._head = data
        self._loop.call_soon(self._flush)  # for when no body follows at once

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")
