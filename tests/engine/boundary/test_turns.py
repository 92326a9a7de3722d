"""How long a neighbour waits for the engine's turns while others keep it busy, in simulated time.

A crowd has calls for passes under way without end, and may make adapters beside them. A neighbour
sends a sample or a pass now and then, mostly while a turn of the crowd's is under way.
"""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest

from tests.engine.boundary.stub_core import PART_SECONDS, TURN_SECONDS, StubCore
from tests.engine.boundary.stub_requests import job, passes
from tinsmith.engine.base import Failure, FinishedPass, Pass
from tinsmith.engine.local.boundary.messages import Done, Item, Reply, Request, Result
from tinsmith.engine.local.boundary.worker import Incoming, Worker
from tinsmith.types import ForwardBackwardOutput, LoraConfig

NUM_REQUESTS = 40
CREATE_SECONDS = 0.5


class BusyCore(StubCore):
    """Messages arrive while a turn takes its time; a pass has its result with its last part."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self.agenda: list[tuple[float, Request]] = []

    def _spend(self, what: str, seconds: float) -> None:
        super()._spend(what, seconds)
        while self.agenda and self.agenda[0][0] <= self.now:
            self.inbox.put(self.agenda.pop(0)[1])

    def create_adapter(self, adapter_id: str, base_model: str, lora: LoraConfig) -> Failure | None:
        self._spend("create", CREATE_SECONDS)
        return None

    def _run_passes(self, passes: Sequence[Pass]) -> Generator[FinishedPass | None, None, None]:
        for index, item in enumerate(passes):
            num_parts = int(item.adapter_id.partition(":")[2])
            for number in range(num_parts):
                self._spend("part", PART_SECONDS)
                if number < num_parts - 1:
                    yield None
            output = ForwardBackwardOutput("ArrayRecord", [], {})
            yield FinishedPass(index, output, num_parts * PART_SECONDS)


class Crowd:
    """One owner's many adapters: a call for passes is always under way, others come beside it."""

    def __init__(self, core: BusyCore, seed: int, first_number: int) -> None:
        self._core = core
        self._random = random.Random(seed)
        self._numbers = itertools.count(first_number)
        self._calls: set[int] = set()

    def send(self, *, is_call: bool) -> None:
        number = next(self._numbers)
        if is_call:
            self._calls.add(number)
            sizes = self._random.choices(range(1, 6), k=self._random.randint(1, 8))
            items = passes(*(f"parts{number}-{i}:{size}" for i, size in enumerate(sizes)))
            theirs = tuple(replace(item, scope="crowd") for item in items)
            self._core.inbox.put(Request(number, "run_passes", (theirs,)))
        else:
            arguments = (f"other{number}", "base", LoraConfig(rank=4))
            self._core.inbox.put(Request(number, "create_adapter", arguments))

    def answered(self, reply: Reply) -> None:
        if isinstance(reply, Done | Result):
            self.send(is_call=reply.number in self._calls)


def _delays(
    requests: Sequence[tuple[float, Request]],
    seed: int,
    *,
    makes_adapters: bool = False,
    core: BusyCore | None = None,
) -> dict[int, float]:
    """How long each request took beside a crowd, by its number."""
    core = core or BusyCore()
    core.agenda = list(requests)
    sent_at = {request.number: at for at, request in requests}
    crowd = Crowd(core, seed, first_number=1 + max(sent_at))
    delays: dict[int, float] = {}

    def send(replies: list[Reply]) -> None:
        for reply in replies:
            if reply.number not in sent_at:
                crowd.answered(reply)
            elif isinstance(reply, Item):
                delays[reply.number] = core.now - sent_at[reply.number]
        if len(delays) == len(sent_at):
            core.inbox.put(None)

    crowd.send(is_call=True)
    if makes_adapters:
        crowd.send(is_call=False)
    Worker(core, core.inbox, send, core.clock).run()
    return delays


@pytest.mark.parametrize("makes_adapters", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_sample_no_longer_than_a_turn_waits_for_the_one_under_way_when_it_came(
    seed: int, makes_adapters: bool
) -> None:
    """If that was a short one, it is owed little, and one long turn comes after it."""
    chosen = random.Random(seed)
    requests, lengths, at = [], {}, 0.0
    for number in range(1, NUM_REQUESTS + 1):
        at += chosen.uniform(40, 60)
        lengths[number] = chosen.randint(1, int(PART_SECONDS / TURN_SECONDS))
        arguments = (job(f"j{number}", max_tokens=lengths[number]),)
        requests.append((at, Request(number, "sample", arguments)))
    for number, seconds in _delays(requests, seed, makes_adapters=makes_adapters).items():
        own = lengths[number] * TURN_SECONDS
        owed = own + CREATE_SECONDS if makes_adapters else 0.0
        assert seconds <= PART_SECONDS + own + owed


@pytest.mark.parametrize("makes_adapters", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_pass_waits_for_the_turn_under_way_and_no_other(seed: int, makes_adapters: bool) -> None:
    chosen = random.Random(seed)
    requests, at = [], 0.0
    for number in range(1, NUM_REQUESTS + 1):
        at += chosen.uniform(40, 60)
        requests.append((at, Request(number, "run_passes", (passes(f"own{number}:1"),))))
    delays = _delays(requests, seed, makes_adapters=makes_adapters)
    assert max(delays.values()) <= 2 * PART_SECONDS


@pytest.mark.parametrize("seed", range(5))
def test_a_pass_of_who_trains_little_waits_for_one_step_of_samples(seed: int) -> None:
    """Though sampling has had less time than training: others have had that of training."""
    chosen = random.Random(seed)
    core, at = BusyCore(), 0.0
    core.inbox.put(Request(0, "sample", (job("endless", max_tokens=10**6),)))
    requests = []
    for number in range(1, NUM_REQUESTS + 1):
        at += chosen.uniform(80, 120)
        items = tuple(replace(item, scope="own") for item in passes(f"own{number}:1"))
        requests.append((at, Request(number, "run_passes", (items,))))
    delays = _delays(requests, seed, core=core)
    assert max(delays.values()) <= 2 * PART_SECONDS + TURN_SECONDS
    sampled = core.log.count("turn") * TURN_SECONDS
    assert 0.45 * core.now < sampled < 0.55 * core.now, "both have had half"
