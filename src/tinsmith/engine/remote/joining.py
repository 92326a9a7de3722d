"""An engine that joins its server from wherever it runs: `tinsmith engine --credentials FILE`.

It connects, says who it is, and is from then on like an engine that the server has started itself.
It lives as long as the connection: one that drops is never made again, because by then its models
are being rebuilt elsewhere.
"""

from __future__ import annotations

import os
import socket
import ssl

from tinsmith import __version__
from tinsmith.engine.local.boundary import frames, process
from tinsmith.engine.local.boundary.messages import Hello
from tinsmith.engine.remote.credentials import SERVER_NAME, Credentials
from tinsmith.engine.remote.tls_stream import TlsStream
from tinsmith.errors import EngineError

CONNECT_SECONDS = 30.0

UNANSWERED_SECONDS = 30
"""After this long without an acknowledgement of its signs of life the engine ends: its server is
out of reach, and has given it up."""


def join(credentials: Credentials, address: str | None = None) -> int:
    """Work for the server until it closes the connection; the exit status."""
    address = address or credentials.address
    stream = TlsStream(_connect(credentials, address))
    hello = Hello(
        slot=credentials.slot,
        epoch=credentials.epoch,
        version=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    frames.write(stream, frames.encode(hello))
    try:
        return process.work(stream, credentials.epoch)
    except ssl.SSLError as error:
        # With TLS 1.3 the engine learns only after its handshake that the server refused it.
        raise EngineError(_refusal(address, error)) from None


def _connect(credentials: Credentials, address: str) -> ssl.SSLSocket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(f"expected HOST:PORT, got {address!r}")
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    except OSError as error:
        raise EngineError(f"cannot reach the server at {address}: {error}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_SECONDS * 1000)
    try:
        return credentials.context().wrap_socket(plain, server_hostname=SERVER_NAME)
    except OSError as error:
        plain.close()
        raise EngineError(_refusal(address, error)) from None


def _refusal(address: str, error: OSError) -> str:
    return (
        f"{address} is not the server that wrote these credentials, or has been started again "
        f"since; use those that are in its data folder now ({error})"
    )
