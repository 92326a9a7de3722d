"""All that runs in a chaos run beside its clients, and where it keeps what it has: the servers, the
proxy before them, their store and storage, and the place of the engines."""

from __future__ import annotations

import argparse
import random
import uuid
from collections.abc import Callable
from pathlib import Path

from chaos import tiny_model
from chaos.machinery import RANK, ObjectStorage, Postgres, Server, SmallDisk, children
from chaos.places import ByHand, OnRay, WithTheServer
from chaos.proxy import FaultProxy, Listens

CACHE_BYTES = 4 * 1024 * 1024
"""For copies of what is in object storage: so few that they make room for each other."""
BUCKET = "s3://bucket/chaos"
DISK_BYTES = 128 * 1024 * 1024
"""The data folder's disk, and as much again for each minute: clients leave checkpoints behind."""


class Installation:
    def __init__(
        self, arguments: argparse.Namespace, folder: Path, listen: Callable[[], Listens]
    ) -> None:
        """`listen` gives each connection through the proxy somebody who hears what passes."""
        seed = arguments.seed
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.disk = SmallDisk(folder / "disk", round((1 + arguments.minutes) * DISK_BYTES))
        self.postgres = Postgres() if arguments.store == "postgres" else None
        options = ["--ranks", str(arguments.ranks)]
        if self.postgres is not None:
            self.postgres.start()
            options += ["--database-url", self.postgres.url]
        model = arguments.model
        if model is None:
            model = folder / "tiny"
            tiny_model.build(model)
        self.data = self.disk.folder / "data"
        self.objects = ObjectStorage(folder / "s3") if arguments.storage == "s3" else None
        self.bucket = self.objects.folder(BUCKET) if self.objects is not None else None
        self.storage_options: list[str] = []
        if self.objects is not None:
            self.storage_options = ["--storage", BUCKET]
            self.storage_options += ["--set", f"storage_cache_bytes={CACHE_BYTES}"]
            options += self.storage_options
            self.objects.start()
            self.storage_proxy = FaultProxy([self.objects.port], random.Random(seed + 3))
        self.place = self._place(arguments.cluster, arguments.engines, random.Random(seed + 2))
        options += self.place.options
        self.servers = [
            Server(folder, self.data, model, self.mark, arguments.engines, *options)
            for _ in range(arguments.replicas)
        ]
        for server in self.servers:
            server.variables |= self.place.variables
        self.server = self.servers[0]
        self.proxy = FaultProxy(
            [server.port for server in self.servers], random.Random(seed + 1), listen
        )

    @property
    def store_url(self) -> str:
        if self.postgres is not None:
            return self.postgres.url
        return f"sqlite:///{self.data / 'tinsmith.db'}"

    @property
    def kept_in(self) -> Path:
        """Where weights, requests and results are."""
        return self.bucket or self.data

    def _place(self, cluster: str, num_engines: int, chance: random.Random) -> WithTheServer:
        if cluster == "tcp":
            return ByHand(self.data, num_engines, chance, self.mark)
        if cluster == "ray":
            return OnRay(lambda: self.servers, chance, self.mark)
        return WithTheServer()

    async def start(self) -> None:
        await self.place.start()
        if self.objects is not None:
            await self.storage_proxy.start()
            for server in self.servers:
                server.variables |= self.objects.environment(self.storage_proxy.port)
        await self.start_all()
        await self.proxy.start()

    async def start_all(self) -> None:
        """Those servers that do not run; the first of all makes the key."""
        for server in self.servers:
            if server.process is None or server.process.poll() is not None:
                await server.start()

    async def kill_all(self) -> None:
        for server in self.servers:
            await server.kill()

    def engines(self) -> list[int]:
        return sorted({pid for server in self.servers for pid in self.place.engines(server)})

    def ranks(self) -> list[int]:
        """The engine processes, and those that have models together with them."""
        engines = self.engines()
        return [*engines, *(rank for engine in engines for rank in children(engine, RANK))]

    async def close(self) -> None:
        await self.proxy.close()
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                await server.kill()
        await self.place.close()
        if self.postgres is not None:
            self.postgres.close()
        if self.objects is not None:
            await self.storage_proxy.close()
            self.objects.close()
        self.disk.close()
