"""A pytest plugin for which this machine is alone: connections may go to loopback only."""

from __future__ import annotations

import socket
from typing import Any

_connect = socket.socket.connect


def _connect_to_loopback(self: socket.socket, address: Any) -> None:
    host = address[0] if isinstance(address, tuple) else "unix"
    if host not in ("unix", "127.0.0.1", "::1", "localhost"):
        raise OSError(f"a test tried to reach {host}")
    _connect(self, address)


def pytest_configure() -> None:
    socket.socket.connect = _connect_to_loopback  # type: ignore[method-assign]
    socket.getaddrinfo = _only_loopback(socket.getaddrinfo)


def _only_loopback(resolve: Any) -> Any:
    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "", "127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to look up {host}")
        return resolve(host, *args, **kwargs)

    return getaddrinfo
