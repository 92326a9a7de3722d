"""A server on the data folder of each test, in its process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import (  # fixtures among them
    database_url,  # noqa: F401
    postgres_url,  # noqa: F401
    provide_tables,
)
from tests.support.in_process_server import MODEL, Api, StartServer, TestServer
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.server.config_sources import build_config
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.auth import create_key
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.metrics import Metrics
from tinsmith.server.service import Service
from tinsmith.server.serving import claim_store
from tinsmith.server.tracing import Spans
from tinsmith.server.tuning import TUNING, Tuning


@pytest.fixture
async def start_server(tmp_path: Path) -> AsyncIterator[StartServer]:
    """Start a server on this test's data folder; again after `stop` for a restart."""
    servers: list[TestServer] = []
    keys: list[str] = []

    async def start(
        broken: str = "",
        engine: type[FakeEngine] = FakeEngine,
        before_start: Callable[[SlotPlan], Awaitable[None]] | None = None,
        spans: Spans | None = None,
        tuning: Tuning = TUNING,
        **settings: Any,
    ) -> TestServer:
        """With engines that are up; `broken` is why none can be started, and `before_start` is
        waited for each time one is."""
        config = build_config({"data_dir": tmp_path / "data", "hold_seconds": 0.5, **settings})
        if config.database_url is None:
            folder = DataFolder(config.data_dir)
            folder.create()
            provide_tables(folder.database)
        store = await claim_store(config)
        if not keys:
            keys.append((await create_key(store, "owner", "first"))[0])
        engines: list[FakeEngine] = []

        async def factory(plan: SlotPlan) -> FakeEngine:
            if broken:
                raise RuntimeError(broken)
            if before_start is not None:
                await before_start(plan)
            model = FakeModel(name=MODEL)
            engines.append(
                engine(
                    FakeEngineConfig(
                        models=(model,),
                        pass_seconds=config.fake_pass_seconds,
                        token_seconds=config.fake_token_seconds,
                    )
                )
            )
            return engines[-1]

        secret = await store.keys.secret("signing")
        service = Service(
            config, store, secret, factory, Metrics(), spans or Spans(), tuning=tuning
        )
        service.url = "http://server"
        await service.start()
        if not broken:
            for slot in service.engines.slots:
                await slot.get()  # tests look into `engines` at once
        servers.append(TestServer(service, keys[0], engines))
        return servers[-1]

    yield start
    for server in servers:
        if not server.service.is_draining:
            await server.stop()


@pytest.fixture
async def server(start_server: StartServer) -> TestServer:
    return await start_server()


@pytest.fixture
def api(server: TestServer) -> Api:
    return server.api
