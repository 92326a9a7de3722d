"""When a batch of passes waits for those who were in the last one."""

from __future__ import annotations

import heapq
import itertools

import pytest

from tinsmith.server.operations.gathering import LONGEST_SECONDS, Gathering

FIXED, PER_TOKEN = 0.04, 1e-5
TOKENS = 512


def _learnt(fixed: float = FIXED, per_token: float = PER_TOKEN) -> Gathering:
    """It has seen batches of one and of seven, and that `a` and `b` come back after 20 ms."""
    gathering = Gathering()
    for num_models in (1, 7, 1, 7):
        num_tokens = num_models * TOKENS
        gathering.batch_ended(
            ["a", "b"], num_tokens=num_tokens, seconds=fixed + per_token * num_tokens, at=1.0
        )
        assert gathering.hold(["a", "b"], 1.02) == 0, "all are there"
    gathering.batch_ended(["a", "b"], num_tokens=TOKENS, seconds=fixed, at=2.0)
    return gathering


def test_who_is_ready_waits_for_one_who_is_due() -> None:
    gathering = _learnt()
    assert 0.03 < gathering.hold(["c"], 2.0) <= FIXED
    assert gathering.hold(["c", "a"], 2.02) > 0
    assert gathering.hold(["c", "a", "b"], 2.025) == 0, "nobody else is due"


def test_nobody_waits_longer_than_a_batch_costs_beside_its_tokens() -> None:
    assert _learnt().hold(["c"], 2.0 + FIXED) == 0
    assert _learnt(fixed=30.0).hold(["c"], 2.0) == pytest.approx(LONGEST_SECONDS)


def test_nobody_waits_where_time_goes_by_tokens_alone() -> None:
    assert _learnt(fixed=0.0, per_token=1e-3).hold(["c"], 2.0) == 0


def test_nobody_waits_on_an_idle_server_or_before_anything_is_known() -> None:
    assert _learnt().hold(["a"], 60.0) == 0
    gathering = Gathering()
    assert gathering.hold(["a"], 0.0) == 0
    gathering.batch_ended(["a", "b"], num_tokens=TOKENS, seconds=1.0, at=1.0)
    assert gathering.hold(["a"], 1.01) == 0


def test_one_who_comes_back_late_is_not_waited_for_again() -> None:
    gathering = _learnt()
    assert gathering.hold(["b"], 2.02) > 0
    gathering.batch_ended(["b"], num_tokens=TOKENS, seconds=FIXED, at=3.0)
    assert gathering.hold(["c", "b"], 3.02) == 0, "a has missed a batch already"
    assert gathering.hold(["a"], 9.0) == 0
    gathering.batch_ended(["a", "b"], num_tokens=TOKENS, seconds=FIXED, at=10.0)
    assert gathering.hold(["b"], 10.01) == 0, "a took seconds the last time"


def _rounds(num_loops: int, seconds: float, gathering: Gathering | None) -> int:
    """How many passes so many loops get through on a device with a fixed cost for each batch."""
    arrivals = [(0.013 * number, str(number)) for number in range(num_loops)]
    ready: list[str] = []
    done, now = 0, 0.0
    for turn in itertools.count():
        while arrivals and arrivals[0][0] <= now:
            came_at, model = heapq.heappop(arrivals)
            ready.append(model)
            if gathering is not None:
                gathering.hold([model], came_at)  # as the scheduler looks at every arrival
        held = gathering.hold(ready, now) if gathering is not None else 0.0
        if not ready or held:
            # Somebody comes, or the wait is over.
            coming = arrivals[0][0] if arrivals else float("inf")
            now = max(now, min(coming, now + held if ready else coming))
            continue
        taken = FIXED + PER_TOKEN * TOKENS * len(ready)
        now += taken
        if gathering is not None:
            gathering.batch_ended(ready, num_tokens=TOKENS * len(ready), seconds=taken, at=now)
        for number, model in enumerate(ready):
            heapq.heappush(arrivals, (now + 0.015 + 0.001 * ((number + turn) % 8), model))
        done += len(ready)
        ready = []
        if now > seconds:
            return done
    raise AssertionError


def test_eight_loops_fall_into_step() -> None:
    apart, together = _rounds(8, 20.0, None), _rounds(8, 20.0, Gathering())
    assert together > 1.15 * apart
    ideal = 20.0 / (FIXED + PER_TOKEN * TOKENS * 8 + 0.022) * 8
    assert together > 0.95 * ideal
