"""An engine that has connected to its server over TCP: how it comes, and how it goes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.remote_engines import ByHand, cluster_by_hand, connected
from tinsmith.engine.base import Pass
from tinsmith.engine.local.boundary.messages import Patience
from tinsmith.engine.remote.cluster import RemoteCluster
from tinsmith.errors import EngineDiedError, EngineError
from tinsmith.types import LoraConfig

STUB = "tests.engine.boundary.stub_core:StubCore"
LORA = LoraConfig(rank=4)

Cluster = tuple[RemoteCluster, ByHand]


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster_by_hand(tmp_path) as both:
        yield both


async def test_calls_and_streams_cross_the_network(cluster: Cluster) -> None:
    engine = await connected(cluster[0], STUB, {})
    assert await engine.create_adapter("a", "base", LORA) is None
    passes = [Pass(adapter_id="parts:3", data=[], loss_fn="cross_entropy")] * 2
    assert [p.index async for p in engine.run_passes(passes)] == [0, 1]
    with pytest.raises(EngineError, match="out of cheese"):
        await engine.create_adapter("raise", "base", LORA)
    assert (await engine.health()).alive
    await engine.close()


async def test_what_pends_when_the_process_is_killed_is_told_so_at_once(cluster: Cluster) -> None:
    engine = await connected(cluster[0], STUB, {})
    pending = asyncio.create_task(engine.create_adapter("slow:3600", "base", LORA))
    await asyncio.sleep(0)  # it is sent
    os.kill(engine.hello.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=rf"slot 0 \(process {engine.hello.pid} on .*closed"):
        async with asyncio.timeout(30):
            await pending
    assert not (await engine.health()).alive
    assert cluster[1].released == [(0, 1)]
    await engine.close()


async def test_a_stopped_engine_is_given_up_and_ends_when_it_comes_back(cluster: Cluster) -> None:
    engine = await connected(cluster[0], STUB, {}, Patience(silence_seconds=3.0))
    os.kill(engine.hello.pid, signal.SIGSTOP)
    with pytest.raises(EngineDiedError, match="gave no sign of life for 3 s and was given up"):
        async with asyncio.timeout(60):
            await engine.create_adapter("a", "base", LORA)
    successor = await connected(cluster[0], STUB, {})
    os.kill(engine.hello.pid, signal.SIGCONT)
    zombie = cluster[1].processes[0]
    assert await asyncio.to_thread(zombie.wait, 60) == 0
    assert await successor.create_adapter("a", "base", LORA) is None
    await engine.close()
    await successor.close()


async def test_a_closed_connection_ends_the_process(cluster: Cluster) -> None:
    engine = await connected(cluster[0], STUB, {})
    await engine.close()
    assert await asyncio.to_thread(cluster[1].processes[0].wait, 60) == 0
    with pytest.raises(EngineDiedError, match="was closed"):
        await engine.capabilities()


async def test_an_engine_that_is_said_to_have_ended_is_dead_although_connected(
    cluster: Cluster,
) -> None:
    engine = await connected(cluster[0], STUB, {})
    cluster[1].ended[0].set_result("is on a node that has died")
    with pytest.raises(EngineDiedError, match="is on a node that has died"):
        async with asyncio.timeout(30):
            await engine.create_adapter("slow:3600", "base", LORA)
    await engine.close()


async def test_an_engine_that_cannot_start_says_why(cluster: Cluster) -> None:
    with pytest.raises(EngineError, match="there is no such device"):
        await connected(cluster[0], STUB, {"refuse": 1.0})
    assert cluster[1].released == [(0, 1)]


async def test_an_engine_that_sees_another_data_folder_says_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster[0].listener.open()
    (tmp_path / "engines" / "shared").write_text("another server's")
    with pytest.raises(EngineError, match="does not see the server's data folder"):
        await connected(cluster[0], STUB, {})


async def test_the_file_of_a_slot_is_for_its_user_alone_and_gone_when_used(
    cluster: Cluster, tmp_path: Path
) -> None:
    modes = []
    place = cluster[1].place

    def look(slot: int, epoch: int, credentials: Path) -> asyncio.Future[str]:
        modes.append(credentials.stat().st_mode & 0o777)
        return place(slot, epoch, credentials)

    cluster[1].place = look  # type: ignore[method-assign]  # the test's own placer
    mask = os.umask(0)
    try:
        engine = await connected(cluster[0], STUB, {})
    finally:
        os.umask(mask)
    assert modes == [0o600]
    assert not (tmp_path / "engines" / "slot-0.json").exists()
    await engine.close()
