"""Samplers: frozen weights in an engine that holds only a few of them."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tinsmith.engine.base import Engine, Failure, Health
from tinsmith.server.sampling.loaded import LoadedSamplers

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def freeze(api: Api, model: str, seq_id: int) -> str:
    """What `save_weights_and_get_sampling_client` sends."""
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    saved = await api.ok("/save_weights_for_sampler", body)
    return str((await api.result(saved["request_id"]))["sampling_session_id"])


async def sampler_of_checkpoint(api: Api, number: int = 0) -> str:
    """A sampler whose weights are on disk and not in the engine."""
    session = await api.session()
    model = await api.create_model(session)
    saved = await api.ok("/save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "x"})
    path = (await api.result(saved["request_id"]))["path"]
    body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
    return str((await api.ok("/create_sampling_session", body))["sampling_session_id"])


async def test_a_loop_of_freezes_leaves_no_more_samplers_in_the_engine_than_the_limit(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=4)
    api, model = server.api, await server.api.model()
    samplers = []
    for seq_id in range(1, 31):
        samplers.append(await freeze(api, model, seq_id))
        await api.sample(samplers[-1])
        assert (await server.engines[-1].health()).num_samplers <= 4
    assert len((await api.sample(samplers[0], 1)).sequences) == 1, "an old one is loaded again"


async def test_more_samplers_in_use_than_the_limit_wait_for_each_other_and_all_succeed(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=2, fake_token_seconds=0.002)
    api, model = server.api, await server.api.model()
    samplers = [await freeze(api, model, seq_id) for seq_id in range(1, 11)]
    results = await asyncio.gather(*[api.sample(s, n) for s in samplers for n in range(4)])
    assert all(len(result.sequences) == 1 for result in results)
    assert (await server.engines[-1].health()).num_samplers <= 2


class Names:
    """An engine that holds names instead of weights."""

    async def load_sampler(self, weights_id: str, base_model: str, folder: Path) -> None: ...

    async def unload_sampler(self, weights_id: str) -> None: ...


class Jobs:
    """Jobs on samplers in three places; each runs until it is ended."""

    def __init__(self) -> None:
        self._loaded = LoadedSamplers(lambda name: nullcontext(Path(name)), max_loaded=3)

    def heed(self, sampler_bytes: int) -> None:
        """The engine says how much it holds; its share is 100 bytes."""
        health = Health(
            alive=True,
            adapter_bytes=60 + sampler_bytes,
            sampler_bytes=sampler_bytes,
            adapter_limit_bytes=100,
        )
        self._loaded.heed(health)

    def held(self) -> list[str]:
        return [name for name in ("a", "b", "c", "d") if self._loaded.has(name)]

    async def settle(self) -> None:
        """Let everything that is under way come to where it waits for a job, or ends."""
        for _ in range(100):
            await asyncio.sleep(0)

    async def start(self, weights_id: str, owner: str) -> contextlib.AsyncExitStack:
        """A job that has its weights; gives up after a while without them."""
        job = contextlib.AsyncExitStack()
        async with asyncio.timeout(30.0):
            held = self._loaded.hold(cast("Engine", Names()), 1, weights_id, "tiny", owner)
            assert await job.enter_async_context(held) is None
        return job


async def test_beyond_their_share_of_memory_idle_samplers_leave_and_others_wait() -> None:
    jobs = Jobs()
    for name in ("a", "b"):
        await (await jobs.start(name, "owner")).aclose()
    busy = await jobs.start("c", "owner")
    jobs.heed(40)
    await jobs.settle()
    assert jobs.held() == ["a", "b", "c"], "it is the models that take too much"
    for left in (["b", "c"], ["c"], ["c"]):
        jobs.heed(60)
        await jobs.settle()
        assert jobs.held() == left
    waiting = asyncio.create_task(jobs.start("d", "owner"))
    await jobs.settle()
    assert not waiting.done(), "there is one place left, and it is held"
    jobs.heed(30)
    await (await waiting).aclose()
    await busy.aclose()
    assert jobs.held() == ["c", "d"]


@pytest.mark.parametrize("place", range(3))
async def test_whoever_holds_most_places_gives_one_up_and_another_keeps_his_only_one(
    place: int,
) -> None:
    """Wherever the one who holds a single place stands in the list, and however busy all are."""
    jobs = Jobs()
    order = ["rude1", "rude2"]
    order.insert(place, "kind")
    first = {name: await jobs.start(name, name.strip("12")) for name in order}

    newcomer = asyncio.create_task(jobs.start("new", "newcomer"))
    await jobs.settle()
    async with await jobs.start("kind", "kind"):
        # New jobs before the old ones end: without a promise no place would ever be free.
        again = [asyncio.create_task(jobs.start(name, "rude")) for name in ("rude1", "rude2")]
        await jobs.settle()
        assert sum(task.done() for task in again) == 1, "one of his two is promised"
        await first["rude1"].aclose()
        await first["rude2"].aclose()
        await newcomer
    for task in again:
        task.cancel()


async def test_cancelling_a_sample_while_its_weights_load_harms_no_later_one(
    server: TestServer,
) -> None:
    api, engine = server.api, server.engines[-1]
    sampler = await sampler_of_checkpoint(api)
    load, may_load = engine.load_sampler, asyncio.Event()

    async def load_slowly(weights_id: str, base_model: str, folder: Path) -> Failure | None:
        await may_load.wait()
        return await load(weights_id, base_model, folder)

    engine.load_sampler = load_slowly  # type: ignore[method-assign]  # a slow disk
    first = await api.ok("/asample", api.sample_body(sampler, 0))
    await asyncio.sleep(0.05)
    await api.post("/cancel_future", {"request_id": first["request_id"]})
    second = asyncio.create_task(api.sample(sampler, 1))
    await asyncio.sleep(0.05)
    may_load.set()
    assert len((await second).sequences) == 1
    assert len((await api.sample(sampler, 2)).sequences) == 1
