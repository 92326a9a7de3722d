"""Base models that do not fit into memory together: each waits for its turn, and none for ever."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable, Generator, Sequence

import pytest

from tests.engine.boundary.stub_core import StubCore
from tests.engine.boundary.stub_requests import LORA, job, passes, work
from tinsmith.engine.base import FinishedPass, Pass
from tinsmith.engine.local.boundary.messages import (
    Abandon,
    Done,
    Reply,
    Request,
    Result,
    Trouble,
)
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


class WideCore(StubCore):
    """With room for two base models; notices if two calls have passes of one adapter at a time."""

    def __init__(self, begun: Callable[[], None]) -> None:
        """`begun` is called when the first passes are under way."""
        super().__init__()
        self._begun = [begun]
        self._passing: set[str] = set()

    def has_room_for(self, base_model: str) -> bool:
        return len(self.in_use.keys() | {base_model}) <= 2

    def run_passes(self, passes: Sequence[Pass]) -> Generator[FinishedPass | None, None, None]:
        adapter_ids = {item.adapter_id for item in passes}
        assert not adapter_ids & self._passing, "the adapter has passes under way"
        self._passing |= adapter_ids
        for result in super().run_passes(passes):
            if self._begun:
                self._begun.pop()()
            if result is not None:
                self._passing.remove(passes[result.index].adapter_id)
            yield result


def test_passes_of_an_adapter_do_not_overtake_those_under_way_by_waiting_for_room() -> None:
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    replies: list[Reply] = []

    def send(batch: list[Reply]) -> None:
        replies.extend(batch)
        if sum(isinstance(reply, Done | Trouble) for reply in replies) == 4:
            inbox.put(None)

    def go_on() -> None:
        """Both places are taken; the passes then wait behind a sample that has none."""
        inbox.put(Request(3, "sample", (job("k", 9, base_model="third"),)))
        inbox.put(Request(4, "run_passes", (passes("parts:20@second"),)))

    inbox.put(Request(1, "sample", (job("j", 20, base_model="first"),)))
    inbox.put(Request(2, "run_passes", (passes("parts:20@second"),)))
    core = WideCore(go_on)
    Worker(core, inbox, send, core.clock).run()
    assert sorted(reply.number for reply in replies if isinstance(reply, Done)) == [1, 2, 3, 4]


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
