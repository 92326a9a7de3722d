"""When a batch of passes waits for others who are about to come."""

from __future__ import annotations

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
        gathering.came(["a", "b"], 1.02)
        assert gathering.hold(1.02) == 0, "all are there"
    _ended(gathering, ["a", "b"], at=2.0, seconds=fixed)
    return gathering


def _ended(gathering: Gathering, models: list[str], *, at: float, seconds: float = FIXED) -> None:
    gathering.batch_ended(models, num_tokens=TOKENS, seconds=seconds, at=at)


def test_who_is_ready_waits_for_one_who_is_due() -> None:
    gathering = _learnt()
    gathering.came(["c"], 2.0)
    assert 0.03 < gathering.hold(2.0) <= FIXED
    gathering.came(["a"], 2.02)
    assert gathering.hold(2.02) > 0
    gathering.came(["b"], 2.025)
    assert gathering.hold(2.025) == 0, "nobody else is due"


def test_it_does_not_matter_in_which_batch_one_was_who_is_due() -> None:
    gathering = _learnt()
    _ended(gathering, ["c"], at=2.01)
    gathering.came(["c"], 2.015)
    assert gathering.hold(2.015) > 0, "a and b are due at 2.02"


def test_how_soon_one_comes_back_is_learnt_while_another_batch_runs() -> None:
    """Otherwise two groups that take turns would each seem to come as late as the other ends."""
    gathering = _learnt()
    gathering.came(["a", "b"], 2.02)
    _ended(gathering, ["c", "d"], at=2.2)  # a and b have waited for it
    gathering.came(["c", "d"], 2.21)
    assert gathering.hold(2.21) == 0, "all are there"
    _ended(gathering, ["a", "b"], at=2.3)
    assert gathering.hold(2.3) > 0, "c and d wait for them"


def test_while_steps_run_waiting_costs_nothing() -> None:
    gathering = _learnt()
    assert gathering.hold(2.0 + FIXED) == 0
    assert gathering.hold(2.0 + FIXED, is_stepping=True) > 0
    gathering.steps_ended(2.0 + FIXED)
    assert 0 < gathering.hold(2.0 + FIXED) <= FIXED, "the device is idle from here on"


def test_nobody_waits_longer_than_a_batch_costs_beside_its_tokens() -> None:
    assert _learnt().hold(2.0 + FIXED) == 0
    slow = _learnt(fixed=30.0)
    assert slow.hold(2.0) == pytest.approx(LONGEST_SECONDS)
    assert slow.hold(2.0 + LONGEST_SECONDS, is_stepping=True) == 0


def test_nobody_waits_where_time_goes_by_tokens_alone() -> None:
    assert _learnt(fixed=0.0, per_token=1e-3).hold(2.0) == 0


def test_nobody_waits_on_an_idle_server_or_before_anything_is_known() -> None:
    assert _learnt().hold(60.0) == 0
    gathering = Gathering()
    assert gathering.hold(0.0) == 0
    _ended(gathering, ["a", "b"], at=1.0, seconds=1.0)
    gathering.came(["a"], 1.01)
    assert gathering.hold(1.01) == 0


def test_one_who_has_gone_is_waited_for_once() -> None:
    gathering = _learnt()
    gathering.came(["a"], 2.02)
    assert gathering.hold(2.02) > 0
    for number in range(1, 10):
        _ended(gathering, ["a"], at=2.02 + 0.06 * number)
        gathering.came(["a"], 2.04 + 0.06 * number)
        assert gathering.hold(2.04 + 0.06 * number) == 0, "b has gone"


def test_one_who_comes_back_late_is_not_waited_for() -> None:
    gathering = _learnt()
    gathering.came(["b"], 2.02)
    gathering.came(["a"], 9.0)
    _ended(gathering, ["a", "b"], at=10.0)
    gathering.came(["b"], 10.01)
    assert gathering.hold(10.01) == 0, "a took seconds the last time"
    for at in (11.0, 12.0, 13.0, 13.52):  # nor when he happens to be due
        _ended(gathering, ["b"], at=at)
        gathering.came(["b"], at + 0.01)
        assert gathering.hold(at + 0.01) == 0
