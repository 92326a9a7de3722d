"""The listener: where engines connect to their server, and which of them are let in.

TLS lets in nobody but holders of a certificate that this server has signed. Of those, one engine is
expected for a slot at a time: one with a lower epoch has been replaced, and is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tinsmith import __version__, disk
from tinsmith.engine.local.boundary.frames import Channel
from tinsmith.engine.local.boundary.messages import Hello, SharedFile, Trouble
from tinsmith.engine.remote.authority import Authority
from tinsmith.engine.remote.credentials import engine_name
from tinsmith.errors import EngineError

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""How long a connection may take to say who it is."""

FAREWELL_SECONDS = 2.0
"""How long the other end may take to agree that a connection is over."""


class Arrival(NamedTuple):
    """An engine that was expected and is here."""

    channel: Channel
    hello: Hello


class Expected(NamedTuple):
    """An engine that may come."""

    slot: int
    epoch: int
    credentials: Path
    arrival: asyncio.Future[Arrival]


class EngineListener:
    def __init__(self, host: str, port: int, folder: Path) -> None:
        """`folder` gets the credentials of each slot; engines must see it under the same path."""
        self._host = host
        self._port = port
        self._folder = folder
        self._authority = Authority()
        self._server: asyncio.Server | None = None
        self._expected: dict[int, Expected] = {}
        self._epochs: dict[int, int] = {}
        self.shared = SharedFile(str(folder / "shared"), secrets.token_hex(16))

    async def open(self) -> None:
        disk.create_folder(self._folder)
        disk.publish_file(Path(self.shared.path), self.shared.text.encode(), mode=0o600)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Stranger(self).channel,
                self._host,
                self._port,
                ssl=self._authority.context(),
                ssl_handshake_timeout=HELLO_SECONDS,
                ssl_shutdown_timeout=FAREWELL_SECONDS,
            )
        except OSError as error:
            raise EngineError(
                f"cannot wait for engines on {self._host}:{self._port}: {error}"
            ) from None

    @property
    def is_open(self) -> bool:
        return self._server is not None

    @property
    def address(self) -> str:
        assert self._server is not None, "a listener is opened before it has an address"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    @contextlib.contextmanager
    def expecting(self, slot: int) -> Iterator[Expected]:
        """Let in the next engine of a slot, which finds what it needs in the credentials; those
        before it are no longer let in."""
        epoch = self._epochs[slot] = self._epochs.get(slot, 0) + 1
        file = self._folder / f"slot-{slot}.json"
        self._authority.credentials(self.address, slot, epoch).save(file)
        arrival: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        expected = self._expected[slot] = Expected(slot, epoch, file, arrival)
        try:
            yield expected
        finally:
            del self._expected[slot]
            disk.discard_file(file)
            arrival.cancel()

    def admit(self, channel: Channel, hello: Any) -> None:
        """An engine with a valid certificate has said who it is."""
        problem = self._objection(channel, hello)
        if problem is None:
            self._expected[hello.slot].arrival.set_result(Arrival(channel, hello))
            return
        logger.warning("an engine was refused: %s", problem)
        channel.send([Trouble(0, f"the server refuses this engine: {problem}")])
        channel.close()

    def _objection(self, channel: Channel, hello: Any) -> str | None:
        if not isinstance(hello, Hello):
            return f"its first message was a {type(hello).__name__}"
        slot, epoch = hello.slot, hello.epoch
        if channel.peer_name != engine_name(slot, epoch):
            return f"its certificate is for {channel.peer_name}, not slot {slot} epoch {epoch}"
        if hello.version != __version__:
            return f"it is tinsmith {hello.version}, and the server {__version__}; install the same"
        if epoch < self._epochs.get(slot, 0):
            return f"slot {slot} is at epoch {self._epochs[slot]}, and this engine is of {epoch}"
        expected = self._expected.get(slot)
        if expected is None or expected.arrival.done():
            return f"slot {slot} has its engine"
        return None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            disk.discard_file(Path(self.shared.path))


class _Stranger:
    """Who hears a channel until its engine is known."""

    def __init__(self, listener: EngineListener) -> None:
        self._listener = listener
        self.channel = Channel(self)
        loop = asyncio.get_running_loop()
        # The handshake has a limit of its own, and ends before the channel is anybody's.
        self._limit = loop.call_later(2 * HELLO_SECONDS, self._give_up)

    def message_received(self, message: Any) -> None:
        self._limit.cancel()
        self._listener.admit(self.channel, message)

    def channel_lost(self, error: Exception | None) -> None:
        self._limit.cancel()

    def _give_up(self) -> None:
        if self.channel.is_open:
            self.channel.abort()
