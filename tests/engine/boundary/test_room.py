"""Base models that do not fit into memory together: each waits for its turn, and none for ever."""

from __future__ import annotations

import itertools
import queue
import random

import pytest

from tests.engine.boundary.stub_core import StubCore
from tests.engine.boundary.test_process import LORA, job, passes, work
from tinsmith.engine.local.boundary.messages import Abandon, Done, Reply, Request, Result
from tinsmith.engine.local.boundary.worker import Incoming, Worker


def crowded_core() -> StubCore:
    core = StubCore()
    core.has_room_for_one = True
    return core


def test_who_samples_without_end_does_not_keep_anothers_base_model_out() -> None:
    """Two samples of one model are always under way; another owner trains and samples a second."""
    core = crowded_core()
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    numbers = itertools.count(10)
    wanted = {1, 2, 3}

    def sample_on() -> None:
        number = next(numbers)
        inbox.put(Request(number, "sample", (job(f"{number}", 5, base_model="greedy"),)))

    def send(batch: list[Reply]) -> None:
        for reply in batch:
            if isinstance(reply, Done | Result):
                wanted.discard(reply.number)
                if reply.number >= 10:
                    sample_on()
        if not wanted or core.now > 1000:
            inbox.put(None)

    sample_on()
    sample_on()
    inbox.put(Request(1, "create_adapter", ("a@modest", "modest", LORA)))
    inbox.put(Request(2, "run_passes", (passes("a@modest"),)))
    inbox.put(Request(3, "sample", (job("j", 5, base_model="modest"),)))
    Worker(core, inbox, send, core.clock).run()
    assert not wanted
    assert core.now < 100, "a few jobs of the other, and one's own"


def test_who_waits_for_room_can_be_cancelled_and_given_up() -> None:
    core = crowded_core()
    replies = work(
        Request(1, "sample", (job("j", 20, base_model="greedy"),)),
        Request(2, "sample", (job("k", 5, base_model="modest"),)),
        Request(3, "run_passes", (passes("a@modest"),)),
        Request(4, "cancel", ("k",)),
        Abandon(3),
        core=core,
    )
    assert {reply.number for reply in replies} == {1, 2, 4}
    assert "part" not in core.log and not core.in_use


def test_requests_about_an_adapter_keep_their_order_though_one_waits_for_room() -> None:
    core = crowded_core()
    work(
        Request(1, "sample", (job("j", 20, base_model="greedy"),)),
        Request(2, "run_passes", (passes("a@modest"),)),
        Request(3, "unload_adapter", ("a@modest",)),
        core=core,
    )
    assert core.log[-2:] == ["part", "unload a@modest"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_is_answered_and_those_of_one_model_go_together(seed: int) -> None:
    """The core notices if two models are in use at a time."""
    rng, core = random.Random(seed), crowded_core()
    requests = []
    for number in range(1, 200):
        model = rng.choice("abc")
        if rng.random() < 0.5:
            body = job(f"{number}", rng.randint(1, 9), base_model=model)
            requests.append(Request(number, "sample", (body,)))
        else:
            requests.append(Request(number, "run_passes", (passes(f"{number}@{model}"),)))
    replies = work(*requests, core=core)
    ended = [reply.number for reply in replies if isinstance(reply, Done)]
    assert sorted(ended) == [request.number for request in requests]
    assert not core.in_use
    assert core.num_loads <= 4, "the first one's model, and each with all who wait for it"
