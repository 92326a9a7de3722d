"""Frames: how Python values cross the socket between an engine's process and its caller.

A frame is one pickled value whose large arrays travel beside the pickle, unchanged: they are
written from the memory they lie in and, on arrival, stay in the memory they were received
into. Both ends are the same trusted code, joined by a stream that nobody else can reach or
alter (a socket pair, or TCP inside TLS where each end has proved who it is); that is why
unpickling is acceptable here, and here only.

    header   length of the rest (u64), number of arrays (u32), mark (u32)
    table    offset and length of the pickle, then of each array (u64 each)
    pickle, arrays, each starting at a multiple of `_ALIGNMENT` bytes

`Decoder` knows nothing of sockets: it says where the next bytes should go and returns the
values that became complete. `read`/`write` use it on a blocking socket, `Channel` under asyncio.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from tinsmith.errors import EngineError, TooLargeError

MAX_FRAME_BYTES = 4 * 2**30
"""Most bytes in a frame. Far above any real batch: more means a mistake or a broken stream."""

_HEADER = struct.Struct("<QII")
_MARK = 0x4D534E54
_ALIGNMENT = 64
_SMALL_BYTES = 4096
"""Arrays below this ride inside the pickle: a piece of its own costs more than the copy."""

_STAGING_BYTES = 64 * 1024

Buffer = bytes | memoryview


def encode(value: object, *, max_bytes: int = MAX_FRAME_BYTES) -> list[Buffer]:
    """The pieces of `value`'s frame, to be written one after another.

    Pieces may share memory with arrays inside `value`, so it must not be changed before they
    are written.
    """
    arrays: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BYTES:
            return True
        arrays.append(raw)
        return False

    pickled = pickle.dumps(value, protocol=5, buffer_callback=keep_inside)
    table_bytes = 16 * (1 + len(arrays))
    pickle_start = _aligned(table_bytes)
    spans = [pickle_start, len(pickled)]
    pieces: list[Buffer] = []
    end = pickle_start + len(pickled)
    for array in arrays:
        start = _aligned(end)
        spans += (start, array.nbytes)
        pieces += (bytes(start - end), array)
        end = start + array.nbytes
    if end > max_bytes:
        raise TooLargeError(
            f"the message to the engine is {end} bytes; at most {max_bytes} are possible, "
            "so send the data in smaller calls"
        )
    table = struct.pack(f"<{len(spans)}Q", *spans)
    padding = bytes(pickle_start - table_bytes)
    head = b"".join((_HEADER.pack(end, len(arrays), _MARK), table, padding, pickled))
    return [head, *pieces]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Packed:
    """A value of so many parts that its receiver unpacks it in a thread: on an event loop
    everybody would wait for it."""

    pickled: bytes

    @classmethod
    def of(cls, value: object) -> Packed:
        return cls(pickle.dumps(value, protocol=5))

    def open(self) -> Any:
        return pickle.loads(self.pickled)


class Decoder:
    """Turns received bytes into values.

    Bytes are first received into a staging area, which may hold several small frames. A
    frame that does not fit there is received into memory of its own, where its arrays stay.
    """

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._staged = 0
        self._body: memoryview | None = None
        self._body_filled = 0
        self._num_arrays = 0

    def space(self) -> memoryview:
        """Where to receive the next bytes; never empty."""
        if self._body is not None:
            return self._body[self._body_filled :]
        return self._staging[self._staged :]

    def advance(self, num_bytes: int) -> list[Any]:
        """Take note of `num_bytes` received into `space()`; the values that are now complete."""
        if self._body is not None:
            self._body_filled += num_bytes
            if self._body_filled < len(self._body):
                return []
            body, self._body = self._body, None
            return [_decode(body, self._num_arrays)]
        self._staged += num_bytes
        return list(self._take_staged())

    def _take_staged(self) -> Iterator[Any]:
        start = 0
        while self._staged - start >= _HEADER.size:
            length, num_arrays, mark = _HEADER.unpack_from(self._staging, start)
            if mark != _MARK or length > self._max_bytes:
                raise EngineError(
                    f"the stream to the engine process is broken: a frame claims {length} bytes "
                    f"and mark {mark:#x}"
                )
            start += _HEADER.size
            body = _allocate(length)
            filled = min(length, self._staged - start)
            body[:filled] = self._staging[start : start + filled]
            start += filled
            if filled < length:
                self._body, self._body_filled, self._num_arrays = body, filled, num_arrays
                break
            yield _decode(body, num_arrays)
        rest = self._staged - start
        self._staging[:rest] = self._staging[start : self._staged]
        self._staged = rest


def _allocate(num_bytes: int) -> memoryview:
    # numpy leaves the memory as it is, where bytearray would first fill it with zeros.
    return np.empty(num_bytes, dtype=np.uint8).data


def _decode(body: memoryview, num_arrays: int) -> Any:
    spans = struct.unpack_from(f"<{2 * (num_arrays + 1)}Q", body)
    pieces = [
        body[start : start + length] for start, length in zip(spans[::2], spans[1::2], strict=True)
    ]
    return pickle.loads(pieces[0], buffers=pieces[1:])


class Stream(Protocol):
    """What frames need of a blocking socket."""

    def sendall(self, data: Buffer, /) -> None: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...


def write(stream: Stream, pieces: list[Buffer]) -> None:
    """Send an encoded frame."""
    for piece in pieces:
        stream.sendall(piece)


def read(stream: Stream) -> Iterator[Any]:
    """Values received, until the other end closes the stream."""
    decoder = Decoder()
    while True:
        received = stream.recv_into(decoder.space())
        if not received:
            return
        yield from decoder.advance(received)


class Receiver(Protocol):
    """Who is told what happens on a `Channel`."""

    def message_received(self, message: Any) -> None: ...

    def channel_lost(self, error: Exception | None) -> None: ...


class Channel(asyncio.BufferedProtocol):
    """One end of a stream, of any kind of socket, under asyncio."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.is_lost = False
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, sock: socket.socket, receiver: Receiver) -> Channel:
        loop = asyncio.get_running_loop()
        connect = (
            loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        )
        _, channel = await connect(lambda: cls(receiver), sock=sock)
        return channel

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.is_lost

    def send(self, value: object) -> None:
        """Queue a frame. Frames arrive in the order of these calls."""
        assert self._transport is not None, "a channel is opened before it is used"
        pieces = encode(value)
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def close(self) -> None:
        assert self._transport is not None, "a channel is opened before it is closed"
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is still to be sent is dropped."""
        assert self._transport is not None, "a channel is opened before it is closed"
        self._transport.abort()

    @property
    def peer_name(self) -> str:
        """The common name in the other end's certificate, which TLS has verified; else empty."""
        assert self._transport is not None, "a channel is opened before it is asked"
        certificate = self._transport.get_extra_info("peercert") or {}
        subject = (pair for part in certificate.get("subject", ()) for pair in part)
        return next((value for name, value in subject if name == "commonName"), "")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.space()

    def buffer_updated(self, nbytes: int) -> None:
        for message in self._decoder.advance(nbytes):
            self.receiver.message_received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.receiver.channel_lost(exc)
