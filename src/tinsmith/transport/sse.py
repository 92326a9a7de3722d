"""Server-sent events: bytes in any pieces, whole events out.

However the stream is cut, inside a character or between CR and LF, the same events come out, as
soon as they are complete. An event that the stream's end cuts off is dropped, as the standard says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from tinsmith.errors import TooLargeError

MAX_EVENT_BYTES = 16 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    data: str
    event: str = "message"
    """Its kind."""
    id: str = ""
    """The last id the server gave, by this event or an earlier one."""


class EventDecoder:
    """Holds one unfinished event at most."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._buffer = bytearray()
        self._after_cr = False
        self._is_start = True
        self._data: list[str] = []
        self._size = 0
        self._kind = ""
        self._id = ""

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that `piece` completes."""
        for line in self._lines(piece):
            event = self._take(line)
            if event is not None:
                yield event

    def _lines(self, piece: bytes) -> Iterator[bytes]:
        """Lines end with LF, CR or CR LF. A CR ends its line at once; an LF right after it, even in
        the next piece, belongs to the same ending."""
        start = 0
        if self._after_cr and piece:
            start = 1 if piece[:1] == b"\n" else 0
            self._after_cr = False
        while True:
            end = _first_break(piece, start)
            if end < 0:
                break
            line = bytes(self._buffer) + piece[start:end]
            self._buffer.clear()
            yield line
            start = end + 1
            if piece[end : end + 1] == b"\r":
                if start == len(piece):
                    self._after_cr = True
                elif piece[start : start + 1] == b"\n":
                    start += 1
        self._buffer += piece[start:]
        if len(self._buffer) + self._size > self._max_bytes:
            raise TooLargeError(f"an event of the stream has more than {self._max_bytes} bytes")

    def _take(self, line: bytes) -> Event | None:
        if self._is_start:
            self._is_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._finish()
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        if name == b"data":
            self._data.append(text)
            self._size += len(value)
        elif name == b"event":
            self._kind = text
        elif name == b"id" and "\0" not in text:
            self._id = text
        # A line without a name is a comment; other names are for browsers.
        return None

    def _finish(self) -> Event | None:
        data, kind = self._data, self._kind
        self._data, self._kind, self._size = [], "", 0
        return Event("\n".join(data), kind or "message", self._id) if data else None


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    decoder = EventDecoder()
    async for piece in pieces:
        for event in decoder.feed(piece):
            yield event


def _first_break(piece: bytes, start: int) -> int:
    newline, carriage = piece.find(b"\n", start), piece.find(b"\r", start)
    if newline < 0 or carriage < 0:
        return max(newline, carriage)
    return min(newline, carriage)
