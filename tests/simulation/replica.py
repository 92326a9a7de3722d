"""A server among several, as a process that is started, stopped, killed and started again."""

from __future__ import annotations

import asyncio
import random
from typing import cast

from starlette.applications import Starlette
from starlette.types import ASGIApp

from tests.simulation.database import LoopLease, SimulatedDatabase
from tests.simulation.network import Network, SimulatedForwarding
from tests.simulation.processes import Process
from tests.support.simulated_server import LoopWriter
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.app import build_app
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.metrics import Metrics
from tinsmith.server.replicas.forwarding import Forwarding
from tinsmith.server.replicas.replica import Replica, ReplicaConfig
from tinsmith.server.service import Service
from tinsmith.server.storage import binding
from tinsmith.server.storage.opening import open_storage
from tinsmith.server.store.blobs import INLINE_BYTES
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.fence import Fence
from tinsmith.server.store.store import Store

_SHUTDOWN_SECONDS = 1.0

# Who waits for a server that leads looks for it less often: it costs much and shows little.
_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 0.5


class SimulatedReplica:
    def __init__(
        self,
        random: random.Random,
        name: str,
        config: ServerConfig,
        model: FakeModel,
        database: SimulatedDatabase,
        network: Network,
    ) -> None:
        self._random = random
        self._config = config
        self._model = model
        self._database = database
        self._network = network
        self.name = name
        self.process = Process(name)
        self.process.is_dead = True
        self.app: ASGIApp | None = None
        self.replica: Replica | None = None
        self.inline_bytes = INLINE_BYTES
        self.engines: dict[int, FakeEngine] = {}
        """The present engine of each slot."""
        self._stores: list[tuple[Store, LoopWriter]] = []
        self._num_starts = 0
        network.join(self)

    @property
    def leads(self) -> bool:
        return self.replica is not None and self.replica.service is not None

    def start(self) -> asyncio.Task[None]:
        assert self.process.is_dead
        self._num_starts += 1
        self.process = Process(f"{self.name}.{self._num_starts}")
        return self.process.spawn(self._run())

    async def kill(self) -> None:
        """What was not committed may be there or not; nobody hears which."""
        self.process.kill()
        self.app = self.replica = None
        self.engines = {}
        self._network.break_connections(self)
        self._database.end_sessions(self.name)
        stores, self._stores = self._stores, []
        for _, writer in stores:
            writer.cut()
        for store, _ in stores:
            await store.close()

    async def stop(self) -> None:
        """As SIGTERM does it; returns when the process has ended."""
        self._is_told.set()
        await self._over.wait()

    async def _run(self) -> None:
        """One process, which begins anew when it has lost the lease."""
        self._is_told, self._over = asyncio.Event(), asyncio.Event()
        try:
            while not self._is_told.is_set():
                await self._serve()
        except StoreUnavailableError:
            pass  # it ends, and is started again
        self.app = self.replica = None
        self._stores = []
        self.process.kill()
        self._network.break_connections(self)
        self._over.set()

    async def _serve(self) -> None:
        holder = f"{self.process.name}/{self._random.getrandbits(32):x}"
        seconds = self._config.lease_seconds
        leases = self._database.leases(holder, self.name, seconds)
        lost = asyncio.Event()

        async def lead(epoch: int) -> tuple[Service, Starlette]:
            return await self._lead(Fence(holder=holder, epoch=epoch, seconds=seconds))

        replica = Replica(
            lambda on_change: LoopLease(leases, seconds, on_change, look_seconds=_LOOK_SECONDS),
            lead,
            Metrics(),
            ReplicaConfig(patience_seconds=self._config.hold_seconds, again_seconds=_AGAIN_SECONDS),
            lost.set,
        )
        replica.forwarding = cast(Forwarding, SimulatedForwarding(self._network, self.name))
        await replica.start()
        self.app = self.replica = replica
        waits = [asyncio.create_task(event.wait()) for event in (lost, self._is_told)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.app = None
        replica.begin_drain()
        await asyncio.sleep(_SHUTDOWN_SECONDS)
        self._network.break_connections(self, cancel=True)
        await replica.stop()

    async def _lead(self, fence: Fence) -> tuple[Service, Starlette]:
        writers: list[LoopWriter] = []

        def open_writer(*args: object) -> LoopWriter:
            writers.append(self._database.writer(*args))  # type: ignore[arg-type]
            return writers[0]

        folder = DataFolder(self._config.data_dir)
        folder.create()
        self._database.check()
        store = Store(
            self._database.url,
            folder.blobs,
            open_writer=open_writer,
            fence=fence,
            inline_bytes=self.inline_bytes,
        )
        self._stores.append((store, writers[0]))
        try:
            storage = open_storage(self._config)
            await binding.check(storage, store)
            await binding.bind(storage, store)
            secret = await store.keys.secret("signing")
        except BaseException:
            await store.close()
            raise
        service = Service(
            self._config, store, secret, self._new_engine, Metrics(), epoch=fence.epoch
        )
        service.url = f"http://{self.name}"
        try:
            await service.start()
        except BaseException:
            await service.abandon()
            raise
        return service, build_app(service)

    async def _new_engine(self, plan: SlotPlan) -> FakeEngine:
        await asyncio.sleep(self._random.random())
        seconds = self._config.fake_pass_seconds
        config = FakeEngineConfig(models=(self._model,), pass_seconds=seconds)
        engine = self.engines[plan.number] = FakeEngine(config)
        return engine
