"""Which connections are open, whose they are, and which one goes when there are too many.

A connection is a stranger's until a request on it names an owner. Strangers have a part of all
connections; when it is full, the address with the most of them loses the one that was silent
longest. So clients that connect and send nothing cannot keep out others.
"""

from __future__ import annotations

import resource
from typing import Protocol

from tinsmith.server.edge.shares import Shares

_OTHER_FILES = 512
"""Open files that are not connections: the database, weights, pipes to the engine."""


class Socket(Protocol):
    @property
    def is_busy(self) -> bool:
        """Whether a request on it is being answered."""
        ...

    def abort(self) -> None: ...


class Sockets:
    def __init__(self, max_connections: int) -> None:
        """As many as that, or as the system's limit on open files leaves room for."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(max_connections, max(files - _OTHER_FILES, files // 2))
        self._max_strangers = most // 4
        self._owned = Shares(most - self._max_strangers)
        self._owners: dict[Socket, str] = {}
        self._addresses: dict[Socket, str] = {}
        self._strangers: dict[str, dict[Socket, None]] = {}
        """By address, the one silent longest first."""

    @property
    def total(self) -> int:
        return len(self._owners) + len(self._addresses)

    def opened(self, socket: Socket, address: str) -> None:
        """A stranger's connection; another is closed if there are too many."""
        while len(self._addresses) >= self._max_strangers and (gone := self._least_useful()):
            self.closed(gone)
            gone.abort()
        self._addresses[socket] = address
        self._strangers.setdefault(address, {})[socket] = None

    def heard(self, socket: Socket) -> None:
        """A request came on the connection."""
        if (address := self._addresses.get(socket)) is not None:
            same = self._strangers[address]
            del same[socket]
            same[socket] = None

    def named(self, socket: Socket, owner: str) -> bool:
        """A request on the connection is an owner's; false if the owner has too many."""
        before = self._owners.get(socket)
        if before == owner:
            return True
        if not self._owned.take(owner):
            return False
        if before is not None:
            self._owned.give_back(before)
        self._forget_stranger(socket)
        self._owners[socket] = owner
        return True

    def closed(self, socket: Socket) -> None:
        self._forget_stranger(socket)
        if (owner := self._owners.pop(socket, None)) is not None:
            self._owned.give_back(owner)

    def _forget_stranger(self, socket: Socket) -> None:
        if (address := self._addresses.pop(socket, None)) is not None:
            del self._strangers[address][socket]
            if not self._strangers[address]:
                del self._strangers[address]

    def _least_useful(self) -> Socket | None:
        crowd = max(self._strangers.values(), key=len)
        return next((s for s in crowd if not s.is_busy), next(iter(crowd), None))
