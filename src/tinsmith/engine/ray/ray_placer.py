"""`RayPlacer`: the server's side of the placer, which it starts and starts again.

The server itself is not a Ray driver: a driver that loses its cluster's head ends itself after a
minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tinsmith.engine.cluster import Node
from tinsmith.engine.local.boundary.frames import Channel
from tinsmith.engine.ray.config import ENVIRONMENT
from tinsmith.engine.ray.messages import (
    Begin,
    Command,
    Ended,
    Key,
    Nodes,
    Place,
    Release,
    Report,
    Unable,
)

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 10.0
"""After this long without news of the nodes the cluster counts as out of reach."""

_LONGEST_PAUSE_SECONDS = 30.0
_CLOSE_SECONDS = 10.0


class RayPlacer:
    def __init__(self, address: str, num_cpus: float, num_gpus: float) -> None:
        """`num_cpus` and `num_gpus` are what each engine gets."""
        self._address = address
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._namespace = f"tinsmith-{secrets.token_hex(8)}"
        self._wanted: dict[Key, asyncio.Future[str]] = {}
        self._unsent: list[Command] = []
        self._channel: Channel | None = None
        self._is_lost = asyncio.Event()
        self._problem = f"the placer is connecting to the Ray cluster at {address}"
        self._last_words = ""
        self._heard_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self.nodes: Sequence[Node] = ()

    @property
    def trouble(self) -> str:
        if self._heard_at is None:
            return self._problem
        silence = asyncio.get_running_loop().time() - self._heard_at
        if silence <= SILENCE_SECONDS:
            return ""
        return (
            f"the Ray cluster at {self._address} has not answered for {silence:.0f} s; its head "
            "may be down"
        )

    def place(self, slot: int, epoch: int, credentials: Path) -> asyncio.Future[str]:
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._keep_placer(), name="placer")
        key = (slot, epoch)
        ended = self._wanted[key] = loop.create_future()
        self._send(Place(key, str(credentials), self._num_cpus, self._num_gpus))
        return ended

    def release(self, slot: int, epoch: int) -> None:
        key = (slot, epoch)
        ended = self._wanted.pop(key, None)
        if ended is not None:
            ended.cancel()
            self._send(Release(key))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # The process

    async def _keep_placer(self) -> None:
        clock = asyncio.get_running_loop().time
        pause = 0.5
        while True:
            started = clock()
            try:
                await self._run_placer()
            except OSError as error:
                self._problem = f"the placer cannot be started: {error}"
            is_short = clock() - started < _LONGEST_PAUSE_SECONDS
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS) if is_short else 1.0
            logger.error("%s; next attempt in %.0f s", self._problem, pause)
            await asyncio.sleep(pause)

    async def _run_placer(self) -> None:
        """Start a placer, and return when it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "tinsmith.engine.ray.placer", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
            )
        ours.setblocking(False)
        self._is_lost.clear()
        self._last_words = ""
        channel = await Channel.open(ours, self)
        try:
            unsent = {command.key for command in self._unsent if isinstance(command, Place)}
            placed = tuple(key for key in self._wanted if key not in unsent)
            channel.send(Begin(self._address, self._namespace, placed))
            for command in self._unsent:
                channel.send(command)
            self._unsent.clear()
            self._channel = channel
            await self._is_lost.wait()
        finally:
            self._channel = None
            channel.close()
            await _end(process)
            self._heard_at = None
            reason = self._last_words or f"ended with status {process.returncode}"
            self._problem = f"the placer for the Ray cluster at {self._address} {reason}"

    def _send(self, command: Place | Release) -> None:
        if self._channel is None:
            self._unsent.append(command)
        else:
            self._channel.send(command)

    def message_received(self, message: Report) -> None:
        if isinstance(message, Nodes):
            self._heard_at = asyncio.get_running_loop().time()
            self.nodes = message.nodes
        elif isinstance(message, Unable):
            self._last_words = f"cannot work: {message.reason}"
        elif isinstance(message, Ended):
            ended = self._wanted.pop(message.key, None)
            if ended is not None and not ended.done():
                ended.set_result(message.reason)

    def channel_lost(self, error: Exception | None) -> None:
        self._is_lost.set()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Its socket is closed, so it ends by itself, unless Ray keeps it."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
