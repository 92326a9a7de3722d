"""The body of a request that may have to be sent more than once."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.types import Message, Receive


class ClientGoneError(Exception):
    """The client that sent the request has gone away."""


class Memory:
    """How much all bodies together may keep."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.free_bytes = max_bytes
        self.max_body_bytes = max_body_bytes
        """Largest body that is kept to be sent again."""


class Body:
    """What a client sends, as it comes, and again from the start as long as all of it is kept."""

    def __init__(self, receive: Receive, memory: Memory) -> None:
        self._receive = receive
        self._memory = memory
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.is_whole = False
        self._position = 0
        self.is_repeatable = True
        """Whether it can be sent from its start: it is small, or nothing of it was sent yet."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """From the start."""
        self._position = 0
        while (piece := await self._next()) is not None:
            yield piece

    async def receive(self) -> Message:
        """The ASGI `receive` for an application of our own; from the start where `rewind` was
        called."""
        if self.is_whole and self._position > len(self._kept):
            return await self._receive()
        try:
            piece = await self._next()
        except ClientGoneError:
            return {"type": "http.disconnect"}
        if piece is None:
            self._position += 1
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.request", "body": piece, "more_body": True}

    def rewind(self) -> None:
        self._position = 0

    async def until_gone(self) -> None:
        """Returns when the client goes away. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def forget(self) -> None:
        self._memory.free_bytes += self._kept_bytes
        self._kept, self._kept_bytes = [], 0

    async def _next(self) -> bytes | None:
        """The piece at the present position; None behind the last."""
        if self._position < len(self._kept):
            self._position += 1
            return self._kept[self._position - 1]
        if self.is_whole:
            return None
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.is_whole = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        self._keep(piece)
        return piece

    def _keep(self, piece: bytes) -> None:
        if not self.is_repeatable:
            return
        memory, num_bytes = self._memory, self._kept_bytes + len(piece)
        if num_bytes > memory.max_body_bytes or memory.free_bytes < len(piece):
            self.forget()
            self._position = 0
            self.is_repeatable = False
            return
        self._kept.append(piece)
        self._kept_bytes += len(piece)
        self._memory.free_bytes -= len(piece)
        self._position += 1
