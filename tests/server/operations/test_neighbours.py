"""What one owner sends does not change what another gets, nor, beyond a bound, when.

The engine is the fake one with a fixed time for each pass. In each try one owner's part of what
owners share (the batch of passes, the batch of steps, the commit of ends) is missing, damaged,
broken, late or too much; a neighbour trains meanwhile, and gets the bits that he gets alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.engine.base import Failure
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.operations.shares import Shares
from tinsmith.server.tuning import Tuning
from tinsmith.types import Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer, TestServer
    from tinsmith.engine.base import FinishedPass, Pass, Step
    from tinsmith.server.store.records import StepRecord

BAD_RATE = 0.125
"""A learning rate by which engines of these tests know the step of the one who misbehaves."""


class TimedEngine(FakeEngine):
    """A pass takes as long as its tokens are many; one with many targets of 99 takes longer."""

    TOKEN_SECONDS = 50e-6
    MARKED_SECONDS = 0.1

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        async for finished in super().run_passes(passes):
            data = passes[finished.index].data
            seconds = self.TOKEN_SECONDS * sum(datum.model_input.length for datum in data)
            if _is_marked(data):
                seconds = self.MARKED_SECONDS
            await asyncio.sleep(seconds)
            yield dataclasses.replace(finished, seconds=seconds)


class BrokenResults(FakeEngine):
    """Carries everything out; the results of the one who misbehaves cannot be written down."""

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        async for finished in super().run_passes(passes):
            if _is_marked(passes[finished.index].data):
                assert not isinstance(finished.result, Failure)
                finished.result.metrics["bad"] = object()  # type: ignore[assignment]  # on purpose
            yield finished

    async def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        results = await super().step(steps)
        for step, result in zip(steps, results, strict=True):
            if step.params.learning_rate == BAD_RATE and isinstance(result, dict):
                result["bad"] = object()  # type: ignore[assignment]  # on purpose
        return results


class NotingEngine(FakeEngine):
    """Notes the adapter of every pass that it begins."""

    @functools.cached_property
    def begun(self) -> list[str]:
        return []

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self.begun.extend(item.adapter_id for item in passes)
        async for finished in super().run_passes(passes):
            yield finished


class HeldEngine(FakeEngine):
    """Passes of the one who misbehaves begin, and go on until the test is over."""

    @functools.cached_property
    def is_over(self) -> asyncio.Event:
        return asyncio.Event()

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        async for finished in super().run_passes(passes):
            if _is_marked(passes[finished.index].data):
                await self.is_over.wait()
            yield finished


@contextlib.contextmanager
def _held_until_the_end(server: TestServer) -> Iterator[None]:
    """A server that stops waits for what its engines have in hand, also when a test has failed."""
    try:
        yield
    finally:
        for engine in server.engines:
            assert isinstance(engine, HeldEngine)
            engine.is_over.set()


def _is_marked(data: Sequence[Datum]) -> bool:
    return bool((data[0].loss_fn_inputs["target_tokens"].to_numpy() == 99).all())


def _datum(length: int, target: int = 2) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1] * length),
        loss_fn_inputs={"target_tokens": [target] * length, "weights": [1.0] * length},
    )


async def _train(api: Api, model: str, *, num_steps: int = 4) -> tuple[list[object], float]:
    """What a well-behaved neighbour sees: all his results, and the longest that one took."""
    seen: list[object] = []
    longest = 0.0
    for number in range(1, 2 * num_steps, 2):
        started = time.monotonic()
        output = await api.output(await api.send_pass(model, number, _datum(5 + number)))
        passed = time.monotonic()
        seen.append(output.metrics)
        seen.append((await api.result(await api.send_step(model, number + 1)))["metrics"])
        longest = max(longest, passed - started, time.monotonic() - passed)
    seen.append(await api.loss(model, 2 * num_steps + 1))
    return seen, longest


async def test_short_models_are_not_starved_by_long_ones(start_server: StartServer) -> None:
    """Turns go by time: a tenant with long sequences does not take the device."""
    server = await start_server(max_gathered_tokens=1000, engine=TimedEngine)
    api = server.api
    long, short = await api.model(), await api.model()
    long_ids = [await api.send_pass(long, n, _datum(1000)) for n in range(1, 11)]
    short_ids = [await api.send_pass(short, n, _datum(10)) for n in range(1, 11)]
    await asyncio.gather(*[api.result(i) for i in short_ids])
    pending = [i for i in long_ids if server.service.promises.get(i).outcome is None]  # type: ignore[union-attr]  # all are open
    assert len(pending) >= 5, "ten short passes wait for about one long pass, not for ten"


async def test_a_pass_costs_what_it_takes_not_what_its_tokens_say(
    start_server: StartServer,
) -> None:
    """Passes of five tokens that take as long as those of thousands, as with a loss that sorts."""
    server = await start_server(engine=TimedEngine)
    rude, kind = await server.other_user(), server.api
    costly, model = await rude.model(), await kind.model()
    await _train(kind, await kind.model())
    sent = [await rude.send_pass(costly, n, _datum(5, target=99)) for n in range(1, 31)]

    def num_done() -> int:
        promises = [server.service.promises.get(request_id) for request_id in sent]
        return sum(promise is not None and promise.outcome is not None for promise in promises)

    await server.until(lambda: num_done() > 0)  # one has been measured
    most = 0
    for number in range(1, 5):
        before = num_done()
        await kind.output(await kind.send_pass(model, number, _datum(5)))
        most = max(most, num_done() - before)
    assert most <= 2, "the neighbour waits for the one that runs, not for all of them"


async def test_an_owner_is_charged_what_the_engine_has_measured(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens there were, and whatever was expected of them before."""
    charged: dict[str, float] = {}
    charge = Shares.charge

    def noted(shares: Shares, owner: str, model_id: str, seconds: float) -> None:
        charged[owner] = charged.get(owner, 0.0) + seconds
        charge(shares, owner, model_id, seconds)

    monkeypatch.setattr(Shares, "charge", noted)
    server = await start_server(engine=TimedEngine)
    rude, kind = await server.other_user(), server.api
    costly, model = await rude.model(), await kind.model()
    for number in (1, 2):
        await rude.output(await rude.send_pass(costly, number, _datum(5, target=99)))
        await kind.output(await kind.send_pass(model, number, _datum(500)))
    assert charged["somebody-else"] == pytest.approx(2 * TimedEngine.MARKED_SECONDS)
    assert charged["owner"] == pytest.approx(2 * 500 * TimedEngine.TOKEN_SECONDS)


async def test_a_pass_that_does_not_end_is_waited_for_by_its_owner_alone(
    start_server: StartServer,
) -> None:
    server = await start_server(engine=HeldEngine)
    rude, kind = await server.other_user(), server.api
    first, second, model = await rude.model(), await rude.model(), await kind.model()
    with _held_until_the_end(server):
        held = await rude.send_pass(first, 1, _datum(5, target=99))
        await server.until(lambda: server.service.scheduler.is_batch_running)
        async with asyncio.timeout(60):
            behind = await rude.send_pass(second, 1, _datum(5))
            await _train(kind, model)
            await _train(kind, await kind.model())
        for request_id in (held, behind):
            assert server.service.promises.get(request_id).outcome is None  # type: ignore[union-attr]  # both are open
        assert [o.record.request_id for o in server.service.scheduler.running()] == [held]


@pytest.mark.parametrize("expected_seconds", [0.001, 1000.0])
async def test_a_batch_is_waited_for_only_if_it_is_expected_to_be_short(
    start_server: StartServer, expected_seconds: float
) -> None:
    tuning = Tuning(short_batch_seconds=600.0)
    server = await start_server(engine=HeldEngine, tuning=tuning)
    rude, kind = await server.other_user(), server.api
    costly, model = await rude.model(), await kind.model()
    live = await server.service.models.get(costly)
    assert live is not None
    live.seconds_per_token = expected_seconds / 5
    with _held_until_the_end(server):
        await rude.send_pass(costly, 1, _datum(5, target=99))
        await server.until(lambda: server.service.scheduler.is_batch_running)
        beside = asyncio.create_task(kind.output(await kind.send_pass(model, 1, _datum(5))))
        done, _ = await asyncio.wait([beside], timeout=0.2 if expected_seconds < 1 else 60)
        beside.cancel()
    assert bool(done) == (expected_seconds > 600)


async def test_a_hundred_models_of_one_owner_do_not_crowd_out_another(
    start_server: StartServer,
) -> None:
    """Each batch is one pass, so that turns must be remembered from one to the next."""
    server = await start_server(
        fake_pass_seconds=0.002, max_gathered_tokens=100, engine=NotingEngine
    )
    # Between owners with equal turns the name decides, and the crowd's comes first.
    rude, kind = server.api, await server.other_user()
    owner = (await rude.get("/auth/apikey/me")).json()["details"]["org_details"]["name"]
    assert owner < "somebody-else"
    session = await rude.session()
    crowd = [await rude.create_model(session, number) for number in range(100)]
    model = await kind.model()
    for number in range(2, 7):
        await asyncio.gather(*[rude.send_pass(each, number, _datum(100)) for each in crowd])
    ids = [await kind.send_pass(model, number, _datum(100)) for number in range(2, 22)]
    refuse = server.service.recorder.refuse
    await asyncio.gather(  # now all of them may run
        *[refuse(owner, each, 1, "not needed") for each in crowd],
        refuse("somebody-else", model, 1, "not needed"),
    )
    await asyncio.gather(*[kind.result(each) for each in ids])
    (engine,) = server.engines
    assert isinstance(engine, NotingEngine)
    # In the engine's order, for to hear of the last result takes a busy machine a while.
    last = len(engine.begun) - engine.begun[::-1].index(model)
    others = last - len(ids)
    assert others < 200, f"{others} passes of a crowd began before 20 of a neighbour had"


async def _missing(server: TestServer, rude: Api, folder: Path) -> None:
    await _spoil_payload(rude, folder, lambda file: file.unlink())


async def _damaged(server: TestServer, rude: Api, folder: Path) -> None:
    await _spoil_payload(rude, folder, lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]))


async def _spoil_payload(rude: Api, folder: Path, spoil: Callable[[Path], object]) -> None:
    model = await rude.model()
    large = _datum(4000)
    for number in (2, 3, 4):
        await rude.send_pass(model, number, large, large, large)
    (first, *_) = (folder / "blobs").glob("??/*.payload.*")
    spoil(first)
    await rude.send_pass(model, 1)


async def _broken_results(server: TestServer, rude: Api, folder: Path) -> None:
    for model in [await rude.model() for _ in range(3)]:
        await rude.send_pass(model, 1, _datum(5, target=99))
        await rude.send_step(model, 2, learning_rate=BAD_RATE)


async def _unrecordable_ends(server: TestServer, rude: Api, folder: Path) -> None:
    """The commit of one owner's ends fails, whatever is tried."""
    log, model = server.service.store.log, await rude.model()
    plain = log.finish
    ids = {await rude.send_pass(model, number) for number in (3, 2)}

    async def finish(finishes: Sequence[Any]) -> list[StepRecord]:
        if any(each.request_id in ids and each.status == "done" for each in finishes):
            raise ValueError("this cannot be written")
        return await plain(finishes)

    log.finish = finish  # type: ignore[method-assign]  # a store that cannot write one's text
    await rude.send_pass(model, 1)


async def _too_much(server: TestServer, rude: Api, folder: Path) -> None:
    models = [await rude.model() for _ in range(10)]
    for number in range(1, 6):
        await asyncio.gather(*[rude.send_pass(model, number) for model in models])


async def _late(server: TestServer, rude: Api, folder: Path) -> None:
    for model in [await rude.model() for _ in range(5)]:
        await rude.send_pass(model, 2)  # 1 never comes


@pytest.mark.parametrize(
    ("misbehave", "engine"),
    [
        (_missing, FakeEngine),
        (_damaged, FakeEngine),
        (_broken_results, BrokenResults),
        (_unrecordable_ends, FakeEngine),
        (_too_much, FakeEngine),
        (_late, FakeEngine),
    ],
)
async def test_a_neighbour_gets_the_same_bits_and_waits_no_longer_than_a_bound(
    start_server: StartServer,
    tmp_path: Path,
    misbehave: Callable[[TestServer, Api, Path], Awaitable[None]],
    engine: type[FakeEngine],
) -> None:
    # Nothing is kept in memory, so that requests are read where they can be spoilt.
    server = await start_server(
        engine=engine, fake_pass_seconds=0.005, max_queued_memory_bytes=0, gap_timeout_seconds=600
    )
    rude, kind = await server.other_user(), server.api
    expected, alone = await _train(kind, await kind.model())
    models = [await kind.model(), await kind.model()]
    _, *trained = await asyncio.gather(
        misbehave(server, rude, tmp_path / "data"), *[_train(kind, model) for model in models]
    )
    after, longest = await _train(kind, await kind.model())
    assert after == expected
    for seen, took in trained:
        assert seen == expected
        longest = max(longest, took)
    # By what he waited alone, because this machine may be busy.
    assert longest < 1.5 + 20 * alone


@pytest.mark.parametrize("misbehave", [_missing, _damaged])
async def test_a_request_that_cannot_be_read_fails_alone_and_its_model_goes_on(
    start_server: StartServer, tmp_path: Path, misbehave: Callable[..., Awaitable[None]]
) -> None:
    server = await start_server(max_queued_memory_bytes=0)
    await misbehave(server, server.api, tmp_path / "data")
    (model,) = [live.model_id for live in server.service.models]
    async with asyncio.timeout(60):
        assert await server.api.loss(model, 5) > 0
    log = await server.service.store.log.read(model, 0)
    failed = [operation for operation in log if operation.status == "failed"]
    assert len(failed) == 1 and "cannot be read" in (failed[0].error or "")
    assert failed[0].category == "server"


async def test_results_that_cannot_be_written_end_their_own_operations_only(
    start_server: StartServer,
) -> None:
    server = await start_server(engine=BrokenResults, fake_pass_seconds=0.01)
    rude, kind = await server.other_user(), server.api
    bad, good = await rude.model(), await kind.model()
    passes = await asyncio.gather(
        rude.send_pass(bad, 1, _datum(5, target=99)), kind.send_pass(good, 1, _datum(5))
    )
    error, category = await rude.failure(passes[0])
    assert "internal error" in error and category == "server"
    await kind.result(passes[1])
    steps = await asyncio.gather(
        rude.send_step(bad, 2, learning_rate=BAD_RATE), kind.send_step(good, 2)
    )
    assert (await rude.failure(steps[0]))[1] == "server"
    await kind.result(steps[1])
    assert await rude.loss(bad, 3) == await kind.loss(await kind.model(), 1), "nothing took effect"


async def test_losses_are_neither_kept_nor_run_where_they_are_not_wanted(api: Api) -> None:
    body = {"session_id": await api.session(), "custom_loss_seq_id": 0, "name": "n"}
    graph = {"format": 1, "nodes": [{"op": "output", "name": "o", "target": "output"}]}
    inputs = [{"name": "logprobs", "rank": 1}]
    refused = await api.post("/create_custom_loss", {**body, "inputs": inputs, "graph": graph})
    assert refused.status_code == 403 and "custom_loss_server_side" in refused.json()["detail"]


async def test_an_owners_requests_that_are_slow_to_read_are_read_for_one_batch_at_a_time(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch that left some out began to read others, and all of them were in memory at once,
    uncounted."""
    server = await start_server(
        max_queued_memory_bytes=0,
        max_gathered_tokens=12,
        fake_pass_seconds=0.02,
        tuning=Tuning(short_batch_seconds=1000.0),  # one batch after the other
    )
    rude, kind = server.api, await server.other_user()
    models = [await rude.model() for _ in range(10)]
    quick = [await kind.model() for _ in range(2)]
    rude_owner = (await server.service.store.keys.list())[0].owner
    log = server.service.store.log
    read_payload, order, sent = log.read_payload, list[str](), list[str]()
    num_trained, most = 0, 0

    def is_open(request_id: str) -> bool:
        promise = server.service.promises.get(request_id)
        return promise is not None and promise.outcome is None

    def look() -> None:
        nonlocal most
        queues = [each.queue.operations() for each in server.service.models]
        at_hand = {o.record.request_id for q in queues for o in q if o.request is not None}
        most = max(most, sum(map(is_open, {*order} | (at_hand & {*sent}))))

    async def reading(request_id: str) -> bytes:
        operation = await log.get(request_id)
        assert operation is not None
        if operation.owner == rude_owner:
            order.append(request_id)
            look()
            goal = num_trained + 4
            with contextlib.suppress(TimeoutError):  # a batch in which he is alone waits for it
                await server.until(lambda: num_trained >= goal, seconds=0.3)
        return await read_payload(request_id)

    async def train(model: str) -> None:
        nonlocal num_trained
        for number in range(1, 40):
            await kind.output(await kind.send_pass(model, number))
            num_trained += 1
            look()

    monkeypatch.setattr(log, "read_payload", reading)
    training = [asyncio.create_task(train(model)) for model in quick]
    await server.until(lambda: num_trained > 0)
    sent += [await rude.send_pass(model, 1) for model in models]
    await asyncio.gather(*map(rude.output, sent), *training)
    assert sorted(order) == sorted(sent), "each is read once"
    assert most <= 3, "what is left out of a batch of three"


async def test_a_request_that_is_slow_to_read_is_waited_for_by_its_owner_alone(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was chosen for the batch in which another's is."""
    let_go, release = asyncio.Event(), asyncio.Event()

    class Gate(FakeEngine):
        async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
            if _is_marked(passes[0].data):
                await let_go.wait()
            async for finished in super().run_passes(passes):
                yield finished

    tuning = Tuning(short_batch_seconds=1000.0)  # all wait for the first one
    server = await start_server(engine=Gate, max_queued_memory_bytes=0, tuning=tuning)
    api, other, first = server.api, await server.other_user(), await server.other_user()
    slow, quick, gate = await api.model(), await other.model(), await first.model()
    slow_owner = (await server.service.store.keys.list())[0].owner
    log, read = server.service.store.log, list[str]()
    read_payload = log.read_payload

    async def reading(request_id: str) -> bytes:
        operation = await log.get(request_id)
        assert operation is not None
        if operation.owner == slow_owner:
            await release.wait()
        read.append(request_id)
        return await read_payload(request_id)

    monkeypatch.setattr(log, "read_payload", reading)
    opened = await first.send_pass(gate, 1, _datum(5, target=99))
    held = [await api.send_pass(slow, number) for number in range(1, 4)]
    passed = await other.send_pass(quick, 1)
    let_go.set()
    try:
        async with asyncio.timeout(30):
            await first.output(opened)
            await other.output(passed)
            await other.output(await other.send_pass(quick, 2))
        assert not set(held) & set(read)
    finally:
        release.set()
    async with asyncio.timeout(30):
        for request_id in held:
            await api.output(request_id)
    assert [each for each in read if each in held] == held, "each once, in order"
