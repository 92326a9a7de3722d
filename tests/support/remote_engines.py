"""Engines that connect to their owner over TCP, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.server_process import clean_environment
from tinsmith.engine.local.boundary.messages import Patience, Start
from tinsmith.engine.remote.cluster import RemoteCluster
from tinsmith.engine.remote.engine import ConnectedEngine
from tinsmith.engine.remote.listener import EngineListener

ROOT = Path(__file__).parents[2]


def engine_process(credentials: Path, *options: str) -> subprocess.Popen[str]:
    """`tinsmith engine`, as somebody starts it by hand; cores of tests are found."""
    command = [sys.executable, "-m", "tinsmith", "engine", "--credentials", str(credentials)]
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        [*command, *options],
        env=clean_environment() | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class ByHand:
    """Starts the engine of a slot as soon as it has credentials, like somebody who waits."""

    trouble = ""
    nodes = ()

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.released: list[tuple[int, int]] = []
        self.ended: list[asyncio.Future[str]] = []

    def place(self, slot: int, epoch: int, credentials: Path) -> asyncio.Future[str]:
        self.processes.append(engine_process(credentials))
        self.ended.append(asyncio.get_running_loop().create_future())
        return self.ended[-1]

    def release(self, slot: int, epoch: int) -> None:
        self.released.append((slot, epoch))

    async def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextlib.asynccontextmanager
async def cluster_by_hand(folder: Path) -> AsyncIterator[tuple[RemoteCluster, ByHand]]:
    placer = ByHand()
    cluster = RemoteCluster(EngineListener("127.0.0.1", 0, folder / "engines"), placer)
    try:
        yield cluster, placer
    finally:
        await cluster.close()


async def connected(
    cluster: RemoteCluster, core: str, config: Any, patience: Patience | None = None, slot: int = 0
) -> ConnectedEngine:
    engine = await cluster.start(slot, Start(core, config, patience or Patience()))
    assert isinstance(engine, ConnectedEngine)
    return engine
