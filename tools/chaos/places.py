"""Where the engines of a chaos run are, and what can be broken there beside themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from chaos import ray_nodes
from chaos.machinery import PLACER, Server, children, clean_environment, free_port
from chaos.proxy import FaultProxy

Fault = tuple[str, int, Callable[[], Coroutine[Any, Any, None]]]
"""What it is called, how often it comes in comparison with others, and what does it."""


class WithTheServer:
    """Engines are the server's own processes."""

    def __init__(self) -> None:
        self.options: list[str] = []
        self.variables: dict[str, str] = {}
        """Of the server's environment."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def engines(self, server: Server) -> list[int]:
        return server.engines()

    def faults(self) -> list[Fault]:
        return []


class ByHand(WithTheServer):
    """Engines join over TCP, through a network that drops and delays; there is another as soon as
    the server waits for one."""

    def __init__(
        self,
        data: Path,
        num_engines: int,
        chance: random.Random,
        mark: str,
        look_seconds: float = 0.2,
    ) -> None:
        super().__init__()
        self._look_seconds = look_seconds
        port = free_port()
        self.options = ["--cluster", "manual", "--set", f"engine_port={port}"]
        self._files = [data / "engines" / f"slot-{slot}.json" for slot in range(num_engines)]
        self._network = FaultProxy([port], random.Random(chance.random()))
        self._chance = chance
        self._environment = {**clean_environment(), "CHAOS_RUN": mark}
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._network.start()
        self._keeping = [asyncio.create_task(self._keep(file)) for file in self._files]

    async def close(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._network.close()

    def engines(self, server: Server) -> list[int]:
        return ray_nodes.engines(server.data)

    def faults(self) -> list[Fault]:
        return [
            ("engines' connections cut", 10, self._cut),
            ("engines' network delayed", 8, self._delay),
            ("engines' network silent", 8, self._fall_silent),
        ]

    async def _keep(self, credentials: Path) -> None:
        """An engine for every file of credentials, at once: one that is stopped, or that nobody
        hears, lives on beside the next, as on a machine that is cut off."""
        started: dict[bytes, asyncio.subprocess.Process] = {}
        try:
            while True:
                await asyncio.sleep(self._look_seconds)
                content = await asyncio.to_thread(_content, credentials)
                # Who ended without using them is started again.
                if content and (content not in started or started[content].returncode is not None):
                    started[content] = await self._engine(credentials)
        finally:
            # They end with their connections; a process that is stopped would never.
            alive = [process for process in started.values() if process.returncode is None]
            for process in alive:
                process.kill()
            await asyncio.gather(*(process.wait() for process in alive))

    async def _engine(self, credentials: Path) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tinsmith", "engine", "--credentials", str(credentials)),
            *("--connect", f"127.0.0.1:{self._network.port}"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )

    async def _cut(self) -> None:
        self._network.cut(self._chance.uniform(0.2, 1.0))

    async def _delay(self) -> None:
        self._network.delay_seconds = self._chance.uniform(0.05, 0.5)
        await asyncio.sleep(self._chance.uniform(1.0, 3.0))
        self._network.delay_seconds = 0.0

    async def _fall_silent(self) -> None:
        """Nothing passes and nobody is told; sometimes for longer than a server waits."""
        self._network.is_silent = True
        await asyncio.sleep(self._chance.choice([1.0, 3.0, 9.0]))
        self._network.is_silent = False


def _content(file: Path) -> bytes:
    """Nothing where there is no file."""
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


class OnRay(WithTheServer):
    """Engines are on three nodes of a Ray cluster."""

    def __init__(
        self, servers: Callable[[], list[Server]], chance: random.Random, mark: str
    ) -> None:
        super().__init__()
        self._servers = servers
        self._chance = chance
        environment = {**clean_environment(), "CHAOS_RUN": mark}
        self._stack = contextlib.ExitStack()
        self._nodes = self._stack.enter_context(ray_nodes.ray_nodes(3, environment))
        self.options = ["--cluster", self._nodes.address]
        self.variables = {
            name: value
            for name, value in self._nodes.environment.items()
            if name.startswith("RAY_")
        }

    async def close(self) -> None:
        await asyncio.to_thread(self._stack.close)

    def engines(self, server: Server) -> list[int]:
        return ray_nodes.engines(server.data)

    def faults(self) -> list[Fault]:
        return [
            ("node lost", 12, self._lose_node),
            ("raylet killed", 6, self._kill_raylet),
            ("placer killed", 6, self._kill_placer),
            ("Ray's head killed", 4, self._kill_head),
        ]

    async def _lose_node(self) -> None:
        """The node of an engine, with all that is on it; another joins a little later."""
        engines = [pid for server in self._servers() for pid in self.engines(server)]
        if not engines:
            return
        # The engine may end, or its node, while we look.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._nodes.lose_node_of, self._chance.choice(engines))
            await asyncio.sleep(self._chance.uniform(0.0, 3.0))
            await asyncio.to_thread(self._nodes.add)

    async def _kill_raylet(self) -> None:
        """Its workers are told by Ray, and the engines by nobody."""
        raylet = self._chance.choice(self._nodes.raylets)
        await asyncio.to_thread(self._nodes.kill, raylet)
        await asyncio.to_thread(self._nodes.add)

    async def _kill_placer(self) -> None:
        for server in self._servers():
            assert server.process is not None
            for placer in children(server.process.pid, PLACER):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(placer, signal.SIGKILL)

    async def _kill_head(self) -> None:
        """With it goes all that the cluster knew; it is started anew."""
        await asyncio.to_thread(self._nodes.kill_head)
        await asyncio.sleep(self._chance.uniform(0.0, 5.0))
        await asyncio.to_thread(self._nodes.start_anew)
