"""HTTP connections to the server that holds the lease: one request at a time on each, and then the
next. Enough of HTTP/1.1 to talk to a server of ours."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httptools

_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 5.0
"""How long a connection waits for the next request: far shorter than the other side waits."""

_MAX_IDLE = 64
_READ_BYTES = 64 * 1024

Headers = list[tuple[bytes, bytes]]


class Link:
    """A connection, and the answer that is coming on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self.is_headed = False
        self.headers: Headers = []
        self.is_whole = False

    async def write(self, data: bytes) -> None:
        if self._writer.is_closing():
            # uvloop has an error of its own for this, which is no `OSError`.
            raise ConnectionError("the connection ended before the request")
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> int:
        """The status of the answer, when it comes; `headers` are there then."""
        while not self.is_headed:
            await self._feed()
        return int(self._parser.get_status_code())

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self.is_whole:
                return
            if not self._pieces:
                await self._feed()

    @property
    def is_open(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def is_reusable(self) -> bool:
        return self.is_whole and self._parser.should_keep_alive() and self.is_open

    def reuse(self) -> None:
        self.idle_since = time.monotonic()
        self._begin()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _feed(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionError("the connection ended before the answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"not an HTTP answer: {error}") from None

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_headed = True

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.is_whole = True


class Upstream:
    def __init__(self) -> None:
        self._idle: dict[str, list[Link]] = {}
        self._busy: set[Link] = set()
        self._num_drops = 0

    @contextlib.asynccontextmanager
    async def link(self, url: str) -> AsyncIterator[Link]:
        """A connection for one request. It is closed unless the answer was read to its end."""
        link = self._waiting(url) or await self._connect(url)
        self._busy.add(link)
        try:
            yield link
        finally:
            self._busy.discard(link)
            idle = self._idle.setdefault(url, [])
            if link.is_reusable and len(idle) < _MAX_IDLE:
                link.reuse()
                idle.append(link)
            else:
                link.abort()

    async def reach(self, url: str) -> None:
        """Make a connection, for whoever is next to ask; raises where none can be had."""
        link = await self._connect(url)
        link.reuse()
        self._idle.setdefault(url, []).append(link)

    def drop(self, *, only_unanswered: bool = False) -> None:
        """End the connections: requests on them get no answer any more, or not all of it. Nor is
        one used that is being made."""
        self._num_drops += 1
        for link in list(self._busy):
            if not (only_unanswered and link.is_headed):
                link.abort()
        for link in [each for idle in self._idle.values() for each in idle]:
            link.abort()
        self._idle.clear()

    async def _connect(self, url: str) -> Link:
        num_drops = self._num_drops
        link = await connect(url)
        if num_drops != self._num_drops:
            link.abort()
            raise ConnectionError(f"the connection to {url} was given up")
        return link

    def _waiting(self, url: str) -> Link | None:
        idle = self._idle.get(url, [])
        while idle:
            link = idle.pop()
            if link.is_open and time.monotonic() - link.idle_since < _IDLE_SECONDS:
                return link
            link.abort()
        return None


async def connect(url: str) -> Link:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            return Link(*await asyncio.open_connection(parts.hostname, parts.port or 80))
    except TimeoutError:
        raise ConnectionError(f"no connection to {url} in {_CONNECT_SECONDS:g} s") from None
