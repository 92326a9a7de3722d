"""What the server does for hundreds of models at once: it looks at those that have something to
do, and spreads what it does for all of them.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.queue import SequenceQueue

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer, TestServer


async def test_models_with_nothing_to_do_are_not_looked_at(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [scheduler] = server.service.scheduler.schedulers.values()
    scheduler.housekeeping_seconds = 600.0  # that looks at everything
    idle = [await server.api.model() for _ in range(5)]
    busy = await server.api.model()
    looked_at: list[int] = []
    plain = SequenceQueue.head

    def counted(queue: SequenceQueue) -> Any:
        looked_at.append(id(queue))
        return plain(queue)

    queues = {id(live.queue): live.model_id for live in server.service.models}
    monkeypatch.setattr(SequenceQueue, "head", counted)
    for seq_id in range(1, 21):
        await server.api.result(await server.api.send_pass(busy, seq_id))
    names = [queues[each] for each in looked_at]
    assert names.count(busy) >= 20
    assert max(names.count(each) for each in idle) < 20


async def test_few_snapshots_are_taken_at_a_time(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(snapshot_steps=1)
    snapshots = server.service.snapshots
    plain, at_once, most = snapshots.take, 0, 0

    async def slow(engine: Any, model: LiveModel) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        await plain(engine, model)
        at_once -= 1

    monkeypatch.setattr(snapshots, "take", slow)
    models = [await server.api.model() for _ in range(8)]
    for model in models:
        await server.api.send_pass(model, 1)
        await server.api.send_step(model, 2)

    def all_saved() -> bool:
        return all(not live.is_changed for live in server.service.models)

    await asyncio.gather(*[server.api.loss(model, 3) for model in models])
    await server.until(all_saved, 10)
    assert most == 2


async def test_models_that_began_together_come_due_apart(server: TestServer) -> None:
    snapshots = server.service.snapshots
    models = [await server.service.models.get(await server.api.model()) for _ in range(20)]
    limit = server.service.config.snapshot_seconds

    def num_due(age: float) -> int:
        count = 0
        for live in models:
            assert live is not None
            live.is_changed, live.oldest_since_snapshot = True, time.time() - age
            count += snapshots.is_due(live)
        return count

    assert num_due(limit / 2 - 1) == 0
    assert 0 < num_due(0.75 * limit) < 20
    assert num_due(limit + 1) == 20
