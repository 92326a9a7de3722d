"""What the server does for hundreds of models at once: it looks at those that have something to
do, and spreads what it does for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.server.operations import scheduler as scheduler_module
from tinsmith.server.operations.chooser import choose
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.tuning import Tuning

if TYPE_CHECKING:
    from tests.support.in_process_server import StartServer, TestServer


async def test_models_with_nothing_to_do_are_not_looked_at(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(tuning=Tuning(models_seconds=600.0))  # that looks at everything
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


async def test_what_comes_for_a_model_at_work_is_looked_at_when_it_is_free(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = Tuning(models_seconds=600.0, short_batch_seconds=600.0)
    server = await start_server(tuning=tuning)
    model = await server.api.model()
    engine = server.engines[-1]
    plain, may_pass, has_begun = engine.run_passes, asyncio.Event(), asyncio.Event()

    async def held(passes: Any) -> AsyncIterator[Any]:
        has_begun.set()
        await may_pass.wait()
        async for each in plain(passes):
            yield each

    looks: list[int] = []

    def counted(candidates: Any, *rest: Any, **more: Any) -> Any:
        looks.append(len(candidates))
        return choose(candidates, *rest, **more)

    monkeypatch.setattr(engine, "run_passes", held)
    monkeypatch.setattr(scheduler_module, "choose", counted)
    await server.api.send_pass(model, 1)
    await has_begun.wait()
    num_looks = len(looks)
    sent = [await server.api.send_step(model, seq_id) for seq_id in range(2, 12)]
    assert len(looks) == num_looks
    may_pass.set()
    for request_id in sent:
        await server.api.result(request_id)


async def test_models_of_one_batch_are_stepped_in_one_call(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them is done before the others, and its step waits for theirs."""
    server = await start_server(tuning=Tuning(short_batch_seconds=600.0))  # on any machine
    models = [await server.api.model() for _ in range(4)]
    engine = server.engines[-1]
    plain_passes, plain_step = engine.run_passes, engine.step
    calls: list[tuple[str, int]] = []
    may_pass = asyncio.Event()

    async def passed(passes: Any) -> AsyncIterator[Any]:
        calls.append(("passes", len(passes)))
        await may_pass.wait()
        async for each in plain_passes(passes):
            yield each
            await asyncio.sleep(0.01)

    async def stepped(steps: Any) -> Any:
        calls.append(("steps", len(steps)))
        return await plain_step(steps)

    monkeypatch.setattr(engine, "run_passes", passed)
    monkeypatch.setattr(engine, "step", stepped)
    first = await server.api.send_pass(models[0], 1)
    await server.until(lambda: calls == [("passes", 1)])
    for model in models[1:]:
        await server.api.send_pass(model, 1)
    sent = [await server.api.send_step(model, 2) for model in models]
    may_pass.set()
    for request_id in [first, *sent]:
        await server.api.result(request_id)
    num_stepped = [count for what, count in calls if what == "steps"]
    assert num_stepped == [1, 3], "the first model by itself, then the others together"


async def test_a_step_does_not_wait_for_another_owners_long_pass(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though both passes were in one batch; that holds a step for a moment, not to its end."""
    kind = await server.other_user()
    models = [await server.api.model() for _ in range(2)]
    innocent = await kind.model()
    engine = server.engines[-1]
    plain_passes = engine.run_passes
    sizes: list[int] = []
    may_begin, may_end = asyncio.Event(), asyncio.Event()

    async def passed(passes: Any) -> AsyncIterator[Any]:
        sizes.append(len(passes))
        await may_begin.wait()
        finished = [each async for each in plain_passes(passes)]
        quick = {index for index, each in enumerate(passes) if each.adapter_id == innocent}
        for each in sorted(finished, key=lambda each: each.index not in quick):
            if each.index not in quick and len(passes) > 1:
                await may_end.wait()
            yield each

    monkeypatch.setattr(engine, "run_passes", passed)
    await server.api.send_pass(models[0], 1)
    await server.until(lambda: sizes == [1])
    slow = await server.api.send_pass(models[1], 1)
    await kind.send_pass(innocent, 1)
    step = await kind.send_step(innocent, 2)
    may_begin.set()
    await server.until(lambda: sizes == [1, 2])
    async with asyncio.timeout(30):
        await kind.result(step)
    may_end.set()
    await server.api.result(slow)


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
