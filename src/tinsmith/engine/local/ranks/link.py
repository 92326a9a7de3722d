"""The sockets between the first rank and the others: what is to be done, and how it ended.

Each end reads in a thread of its own, so that it learns at once when another rank is gone, also
while it waits in a sum for one that will not come: it then ends its own process. One rank's death
is the death of all.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinsmith.engine.local.boundary import frames
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.errors import EngineError

logger = logging.getLogger(__name__)

_MODULE = "tinsmith.engine.local.ranks.process"


class Begin(NamedTuple):
    """The first thing that a rank hears."""

    rank: int
    num_ranks: int
    folder: Path
    """The folder in which the ranks find each other."""

    config: LocalEngineConfig


class Link:
    """The sockets of one rank: the first has one to each other rank, those have one to it."""

    def __init__(self, socks: Sequence[socket.socket], on_end: Callable[[int], None]) -> None:
        """`on_end` is called, in another thread, with the number of the socket that has closed."""
        self._socks = list(socks)
        self._on_end = on_end
        self._heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in socks]
        for number in range(len(socks)):
            name = f"link-{number}"
            threading.Thread(target=self._read, args=(number,), name=name, daemon=True).start()

    def tell(self, value: object) -> None:
        pieces = frames.encode(value)
        for sock in self._socks:
            frames.write(sock, pieces)

    def hear(self) -> Any:
        """The next value from the other end of the first socket."""
        return self._heard[0].get()

    def hear_all(self) -> list[Any]:
        """The next value from the other end of each socket."""
        return [heard.get() for heard in self._heard]

    def _read(self, number: int) -> None:
        try:
            for value in frames.read(self._socks[number]):
                self._heard[number].put(value)
        except Exception as error:  # whatever it is, nothing more is heard from there
            logger.error("the socket between two ranks failed", exc_info=error)
        self._on_end(number)


class Others:
    """The processes of the other ranks, started by the first; they end when it does."""

    def __init__(self, num_ranks: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._socks: list[socket.socket] = []
        for _ in range(1, num_ranks):
            ours, theirs = socket.socketpair()
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            )
            theirs.close()
            self._socks.append(ours)
        self.folder: Path | None = None

    def link(self) -> Link:
        return Link(self._socks, self._lose)

    def begin(self, folder: Path, config: LocalEngineConfig) -> None:
        """Say to each who it is."""
        self.folder = folder
        for index, sock in enumerate(self._socks, start=1):
            begin = Begin(index, len(self._socks) + 1, folder, config)
            try:
                frames.write(sock, frames.encode(begin))
            except OSError as error:
                raise EngineError(f"rank {index} of the engine did not start: {error}") from error

    def _lose(self, number: int) -> None:
        status = self._processes[number].wait()
        logger.critical(
            "rank %d of the engine, process %d, ended with status %d; the other ranks end with it",
            number + 1,
            self._processes[number].pid,
            status,
        )
        end(self.folder, status=1)


def end(folder: Path | None, status: int) -> None:
    """End this process now, whatever its other threads are waiting for."""
    logging.shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)
