"""The poller of samples: one request for many, forgetting, crashes and its end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.client.sampling_calls import (
    ASAMPLE,
    make_sampler,
    sample,
)
from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.service import ServiceClient
from tinsmith.client.uplink.api import Api
from tinsmith.errors import (
    TinkerError,
)


def test_one_poll_serves_many_samples(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """With the poller each result is fetched once, when it is there."""
    sampler = make_sampler(stub, make_service, sample_use_retrieve_futures=True)
    for future in [sample(sampler) for _ in range(30)]:
        future.result(10)
    assert stub.count("/retrieve_future") == 30
    polls = [r.json() for r in stub.seen("/retrieve_futures")]
    assert polls[0]["target"] == {
        "type": "sampling_session",
        "sampling_session_id": "s1:sample:0",
        "cloned_sampler_id": 0,
    }

    # What was fetched is told with a later poll: one that is under way was sent without it.
    def told() -> set[str]:
        return {
            each
            for poll in stub.seen("/retrieve_futures")
            for each in poll.json()["retrieved_request_ids"]
        }

    deadline = time.monotonic() + 30
    while len(told()) < 29 and time.monotonic() < deadline:
        sample(sampler).result(10)
    assert len(told()) >= 29


def test_the_poller_forgets_samples_that_were_given_up(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    sampler = make_sampler(stub, make_service, sample_use_retrieve_futures=True)
    held = asyncio.Event()

    async def late(request: Recorded) -> Answer:
        await held.wait()
        answer: Answer = await stub._do_retrieve_futures(request)
        return answer

    stub.on("/api/v1/retrieve_futures", late)
    futures = [sample(sampler) for _ in range(10)]
    deadline = time.monotonic() + 20
    while (sampler._poller is None or len(sampler._poller._waiting) < 10) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    poller = sampler._poller
    assert poller is not None
    for future in futures:
        future.cancel()
    while poller._waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    stub._loop.call_soon_threadsafe(held.set)
    while stub.count("/retrieve_futures") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    told = stub.seen("/retrieve_futures")[1].json()["retrieved_request_ids"]
    assert len(told) == 10 and not poller._early and not poller._waiting


def test_the_poller_forgets_samples_whose_promise_never_came(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """They are cancelled on their way to the service, which carries them out all the same."""
    sampler = make_sampler(stub, make_service, sample_use_retrieve_futures=True)
    sample(sampler).result(10)
    accepted = asyncio.Event()

    async def accept_slowly(request: Recorded) -> Answer:
        answer: Answer = await stub._do_asample(request)
        await accepted.wait()
        return answer

    stub.on(ASAMPLE, *[accept_slowly] * 10, stub._do_asample)
    futures = [sample(sampler) for _ in range(10)]
    deadline = time.monotonic() + 20
    while stub.count("/asample") < 11 and time.monotonic() < deadline:
        time.sleep(0.01)
    for future in futures:
        future.cancel()
    time.sleep(0.05)
    stub._loop.call_soon_threadsafe(accepted.set)
    for _ in range(3):
        sample(sampler).result(10)
    polls = [r.json()["retrieved_request_ids"] for r in stub.seen("/retrieve_futures")]
    assert sampler._poller is not None and not sampler._poller._early
    assert len({each for told in polls for each in told}) >= 12, "the service may forget them, too"


@pytest.mark.parametrize("with_poller", [False, True])
@pytest.mark.parametrize("call", range(1, 5))
def test_a_crash_at_any_point_reaches_the_caller(
    stub: Any,
    make_service: Callable[..., ServiceClient],
    monkeypatch: pytest.MonkeyPatch,
    with_poller: bool,
    call: int,
) -> None:
    """S40, S113: whichever request goes wrong in a way nobody thought of, nobody hangs."""
    sampler = make_sampler(stub, make_service, sample_use_retrieve_futures=with_poller)
    original, count = Api.send, itertools.count(1)

    async def crash(self: Api, *args: Any, **options: Any) -> Any:
        if next(count) == call:
            raise ZeroDivisionError("crash")
        return await original(self, *args, **options)

    monkeypatch.setattr(Api, "send", crash)
    outcomes = []
    for future in [sample(sampler) for _ in range(3)]:
        try:
            outcomes.append(future.result(10))
        except (ZeroDivisionError, TinkerError) as error:
            outcomes.append(error)
    assert len(outcomes) == 3
    assert any(isinstance(each, Exception) for each in outcomes) or with_poller


def test_duplicate_and_early_completions_are_harmless(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    sampler = make_sampler(stub, make_service, sample_use_retrieve_futures=True)
    state = {"calls": 0}

    async def twice(request: Recorded) -> Answer:
        state["calls"] += 1
        await asyncio.sleep(0.01)
        every = [{"state": "finished", "request_id": f"r{n}"} for n in range(1, 40)]
        return Answer(200, {"completions": every * 2, "cursor": state["calls"]})

    stub.on("/api/v1/retrieve_futures", twice)
    for future in [sample(sampler) for _ in range(10)]:
        future.result(10)
    assert stub.count("/asample") == stub.count("/retrieve_future") == 10


@pytest.mark.parametrize(
    ("script", "works"),
    [
        ([Answer(503, headers={"retry-after-ms": "1"})], True),
        ([Answer(400, {"d": 1}, headers={"retry-after-ms": "1"})] * 3, True),
        ([Answer(403, {"detail": "keep out"})], False),
        ([Answer(200, {"nonsense": 1})], False),
    ],
)
def test_a_poller_that_fails_tells_all_who_wait(
    stub: Any, make_service: Callable[..., ServiceClient], script: list[Answer], works: bool
) -> None:
    """S40: nobody hangs because a background task died."""
    sampler = make_sampler(stub, make_service, sample_use_retrieve_futures=True)
    stub.on("/api/v1/retrieve_futures", *script, stub._do_retrieve_futures)
    futures = [sample(sampler) for _ in range(3)]
    if works:
        for future in futures:
            future.result(10)
        return
    for future in [*futures, sample(sampler)]:
        with pytest.raises(TinkerError, match="waiting for samples"):
            future.result(10)
