"""What limits a cluster: a formula, and a simulation that checks it.

    python tools/cluster_arithmetic.py      prints the table of docs/explanation/arithmetic.md

Tenants train in a loop: a pass of some tokens, then a step. The server takes requests one after
another; a slot runs the passes that its tenants have ready as one batch. The constants were
measured (benchmarks/results), on one H200 and on the two cores of a small machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

SLOTS = 64

BATCH_SECONDS = 0.0423
TOKEN_SECONDS = 28.9e-6
"""A batch takes the first, and the second for each token: a line through 512 tokens in 57.1 ms and
8,192 in 279.3 ms, for the shape of Qwen3-4B (tenants-cuda-qwen3-4b)."""

STEP_SECONDS = 0.00115
"""An optimizer step of rank 32 (the same report)."""

REQUEST_SECONDS = 0.00066
"""Of a core, for each request: 979 a second took 0.65 cores (load)."""

REQUESTS_A_STEP = 4
"""A pass, a step, and a question for the result of each."""

MAX_BATCH_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Load:
    tenants: int
    tokens: int
    """In each pass."""
    servers: int = 1
    """How many cores take requests: replicas of the server."""


def predicted_steps_per_second(load: Load) -> float:
    """The less of what the slots do and what the servers take."""
    of_servers = load.servers / (REQUESTS_A_STEP * REQUEST_SECONDS)
    used = min(SLOTS, load.tenants)
    each = load.tenants / used
    at_once = min(each, max(1, MAX_BATCH_TOKENS // load.tokens))
    busy = BATCH_SECONDS + at_once * (TOKEN_SECONDS * load.tokens + STEP_SECONDS)
    # A slot with one batch of tenants waits while they ask for results and send again.
    idle = REQUESTS_A_STEP * REQUEST_SECONDS if at_once == each else 0.0
    return min(used * at_once / (busy + idle), of_servers)


def simulated_steps_per_second(load: Load, seconds: float = 60.0) -> float:
    return _Simulation(load).run(seconds)


class _Simulation:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._requests: deque[Callable[[], None]] = deque()
        self._idle_servers = load.servers
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._num_steps = 0

    def run(self, seconds: float) -> float:
        for tenant in range(self._load.tenants):
            self._send_pass(self._slots[tenant % SLOTS])
        warm_up = seconds / 4
        before = 0
        while self._events and self._now < seconds:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            if self._now < warm_up:
                before = self._num_steps
        return (self._num_steps - before) / (seconds - warm_up)

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), happen))

    def _request(self, then: Callable[[], None], count: int = 1) -> None:
        """Requests one after another, each when a server has time for it; then something."""
        if count:
            self._requests.append(lambda: self._request(then, count - 1))
            self._serve()
        else:
            then()

    def _serve(self) -> None:
        while self._idle_servers and self._requests:
            self._idle_servers -= 1
            self._at(REQUEST_SECONDS, partial(self._served, self._requests.popleft()))

    def _served(self, done: Callable[[], None]) -> None:
        self._idle_servers += 1
        done()
        self._serve()

    def _send_pass(self, slot: _Slot) -> None:
        """A tenant sends a pass and the step after it."""

        def arrive() -> None:
            slot.waiting += 1
            self._run_batch(slot)

        self._request(arrive, 2)

    def _run_batch(self, slot: _Slot) -> None:
        if slot.is_busy or not slot.waiting:
            return
        size = min(slot.waiting, max(1, MAX_BATCH_TOKENS // self._load.tokens))
        slot.waiting -= size
        slot.is_busy = True
        each = TOKEN_SECONDS * self._load.tokens + STEP_SECONDS

        def finish() -> None:
            slot.is_busy = False
            for _ in range(size):
                self._request(self._finished(slot), 2)
            self._run_batch(slot)

        self._at(BATCH_SECONDS + size * each, finish)

    def _finished(self, slot: _Slot) -> Callable[[], None]:
        """A tenant has both results."""

        def finish() -> None:
            self._num_steps += 1
            self._send_pass(slot)

        return finish


@dataclass(slots=True)
class _Slot:
    waiting: int = 0
    """Passes that are ready."""
    is_busy: bool = False


LOADS = [
    *(Load(tenants, tokens) for tokens in (512, 4096, 32_768) for tenants in (16, 64, 2000)),
    Load(2000, 512, servers=4),
    Load(2000, 512, servers=16),
]


def table() -> list[str]:
    lines = [
        "| tenants | tokens a pass | servers | steps a second | tokens a second | limited by |",
        "|---|---|---|---|---|---|",
    ]
    for load in LOADS:
        steps = predicted_steps_per_second(load)
        is_server = steps * REQUESTS_A_STEP * REQUEST_SECONDS > 0.999 * load.servers
        lines.append(
            f"| {load.tenants:,} | {load.tokens:,} | {load.servers} | {steps:,.0f} | "
            f"{steps * load.tokens:,.0f} | {'the server' if is_server else 'the GPUs'} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
    print()
    for load in LOADS:
        print(load, f"{simulated_steps_per_second(load):.0f}", "simulated")
