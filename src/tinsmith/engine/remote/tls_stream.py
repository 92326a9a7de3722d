"""A TLS connection that one thread reads and another writes.

OpenSSL's object must not be used by two threads at a time, and a blocking read would keep it for as
long as nothing comes. So nothing here blocks inside it: both threads ask it, one at a time, for
what can be done at once, and wait outside.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading

from tinsmith.engine.local.boundary.frames import Buffer


class TlsStream:
    """What frames need of a blocking socket, around a connection whose handshake is done."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()

    def sendall(self, data: Buffer, /) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            try:
                with self._lock:
                    sent = self._sock.send(rest)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            else:
                rest = rest[sent:]

    def recv_into(self, buffer: memoryview, /) -> int:
        while True:
            try:
                with self._lock:
                    return self._sock.recv_into(buffer)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)

    def close(self) -> None:
        self._sock.close()

    def _wait(self, event: int) -> None:
        waiting = select.poll()
        waiting.register(self._sock, event)
        waiting.poll()
