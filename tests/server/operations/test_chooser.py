"""The choice of what runs next, with values: no server, no engine, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.server.operations.chooser import (
    COSTLY,
    PASSES_AT_ONCE,
    SAVING_AT_ONCE,
    SINGLES_OF_OWNER,
    STEPS_AT_ONCE,
    Candidate,
    Choice,
    Move,
    UnderWay,
    choose,
    choose_passes,
    choose_steps,
    next_move,
)
from tinsmith.server.operations.kinds import operation_of
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.shares import Shares
from tinsmith.server.store.records import OperationRecord
from tinsmith.server.tuning import TUNING


def _operation(
    seq_id: int, kind: str, num_tokens: int = 10, attempts: int = 0, num_bytes: int = 0
) -> Operation:
    operation = operation_of(
        OperationRecord(
            request_id=str(seq_id),
            model_id="m",
            seq_id=seq_id,
            owner="o",
            kind=kind,
            content_type="",
            num_tokens=num_tokens,
            payload_bytes=num_bytes,
            created_at=0.0,
        )
    )
    operation.attempts = attempts
    return operation


def _candidate(
    name: str,
    *kinds: str,
    owner: str = "",
    num_tokens: int = 10,
    num_bytes: int = 0,
    **facts: Any,
) -> Candidate[str]:
    return Candidate(
        model=name,
        model_id=name,
        owner=owner or name,
        base_model=facts.pop("base_model", "base"),
        front=[
            _operation(1 + n, kind, num_tokens, num_bytes=num_bytes) for n, kind in enumerate(kinds)
        ],
        **facts,
    )


def _choose(candidates: list[Candidate[str]], under_way: UnderWay | None = None) -> Choice[str]:
    return choose(
        candidates,
        under_way or UnderWay(),
        Shares(),
        max_tokens=1000,
        max_seconds=60.0,
        max_attempts=3,
    )


def _names(chosen: Any) -> list[str]:
    return [candidate.model for candidate in chosen]


def test_passes_of_one_model_go_together_in_order_and_stop_at_a_step() -> None:
    choice = _choose([_candidate("a", "forward_backward", "forward", "optim_step", "forward")])
    assert _names(choice.passes) == ["a", "a"] and not choice.steps and not choice.moves


def test_an_owner_with_many_models_gets_no_more_turns_than_one_with_one() -> None:
    crowd = [_candidate(f"c{n}", *["forward_backward"] * 5, owner="crowd") for n in range(100)]
    neighbour = _candidate("n", *["forward_backward"] * 5)
    chosen = _names(choose_passes([*crowd, neighbour], Shares(), 100, 60.0))
    assert chosen.count("n") == 5 and len(chosen) == 10
    assert len(set(chosen)) == 6, "the crowd's five turns are of five models"


def test_the_models_of_one_owner_take_turns_by_time() -> None:
    shares = Shares()
    shares.charge("o", "long", 5.0)
    models = [_candidate(name, *["forward"] * 3, owner="o") for name in ("long", "short")]
    assert _names(choose_passes(models, shares, 30, 60.0)) == ["short"] * 3


@pytest.mark.parametrize("seconds", [0.1, 0.7, 1e-4, 3.0])
def test_of_models_that_had_as_much_one_goes_first_whose_request_is_at_hand(seconds: float) -> None:
    """Also when it was left out of a batch, and so given back what it had been charged with: what
    rounding leaves of that had the requests of all others read, too, one batch after the other."""
    shares = Shares()
    shares.charge("o", "before", 0.3)
    shares.advance("o", "before")
    models = [_candidate(name, "forward_backward", owner="o") for name in "abc"]
    shares.charge("o", "b", seconds)
    shares.charge("o", "b", -seconds)
    models[1].front[0].request = object()
    assert _names(choose_passes(models, shares, 10, 60.0)) == ["b"]


def test_who_was_idle_does_not_save_up_turns() -> None:
    shares = Shares()
    for _ in range(10):
        shares.charge("busy", "busy", 1.0)
        shares.advance("busy", "busy")
    models = [_candidate(name, *["forward"] * 10) for name in ("busy", "idle")]
    chosen = _names(choose_passes(models, shares, 100, 60.0))
    assert 4 <= chosen.count("busy") <= 6


def test_a_batch_holds_one_base_model_and_the_fairest_decides_which() -> None:
    shares = Shares()
    shares.charge("a", "a", 1.0)
    models = [_candidate("a", "forward"), _candidate("b", "forward", base_model="other")]
    assert _names(choose_passes(models, shares, 1000, 60.0)) == ["b"]


def test_a_pass_beyond_the_budget_runs_alone_and_is_not_overtaken_for_ever() -> None:
    large = _candidate("large", "forward", num_tokens=5000)
    small = _candidate("small", *["forward"] * 3)
    assert _names(choose_passes([large], Shares(), 1000, 60.0)) == ["large"]
    shares = Shares()
    shares.charge("large", "large", 0.001)
    assert _names(choose_passes([large, small], shares, 1000, 60.0)) == ["small"]
    shares.charge("small", "small", 0.002)
    assert _names(choose_passes([large, small], shares, 1000, 60.0)) == ["large"]


def test_the_requests_of_a_batch_have_a_bound_in_bytes() -> None:
    """All of them are in memory while it runs, and few tokens may come with very many bytes."""
    third = TUNING.batch_bytes // 3
    many = _candidate("many", *["forward"] * 9, num_tokens=1, num_bytes=third)
    assert _names(choose_passes([many], Shares(), 1000, 60.0)) == ["many"] * 3
    huge = _candidate("huge", "forward", "forward", num_tokens=1, num_bytes=4 * TUNING.batch_bytes)
    assert _names(choose_passes([huge], Shares(), 1000, 60.0)) == ["huge"], "alone"
    shares = Shares()
    shares.charge("huge", "huge", 1.0)
    other = _candidate("other", "forward", num_tokens=1)
    assert _names(choose_passes([huge, other], shares, 1000, 60.0)) == ["other"]


def test_a_batch_has_so_many_passes() -> None:
    kinds = ["forward"] * (PASSES_AT_ONCE + 1)
    tiny = _candidate("tiny", *kinds, num_tokens=1)
    assert len(choose_passes([tiny], Shares(), 10**6, 1e6)) == PASSES_AT_ONCE


def test_a_batch_is_expected_to_take_no_longer_than_it_may() -> None:
    shares = Shares()
    shares.measured("base", "o", 1000, 0.1)
    models = [_candidate(name, *["forward"] * 10, num_tokens=1000) for name in ("a", "b")]
    assert len(choose_passes(models, shares, 100_000, 0.55)) == 5


def test_a_slow_device_gets_an_efficient_batch_though_it_takes_longer() -> None:
    shares = Shares()
    shares.measured("base", "o", 256, 0.2)
    models = [_candidate(name, *["forward"] * 10, num_tokens=256) for name in ("a", "b")]
    assert len(choose_passes(models, shares, 100_000, 0.25)) == 8, "2,048 tokens"
    shares = Shares()
    shares.measured("base", "o", 256, 0.9)
    assert len(choose_passes(models, shares, 100_000, 0.25)) == 2, "but no more than two seconds"
    shares = Shares()
    shares.measured("base", "o", 256, 30.0)
    assert len(choose_passes(models, shares, 100_000, 0.25)) == 1, "one always runs"


def test_a_pass_that_was_under_way_when_the_engine_died_runs_without_company() -> None:
    again = Candidate(
        model="again",
        model_id="again",
        owner="again",
        base_model="base",
        front=[_operation(1, "forward", attempts=1)],
    )
    other = _candidate("other", "forward")
    shares = Shares()
    assert _names(choose_passes([again, other], shares, 1000, 60.0)) == ["again"]
    shares.charge("again", "again", 1.0)
    assert _names(choose_passes([again, other], shares, 1000, 60.0)) == ["other"]


def test_a_pass_known_to_be_slow_keeps_to_its_owners_batch() -> None:
    shares = Shares()
    shares.measured("base", "o", 10, 0.1)
    slow = _candidate("slow", "forward", "forward", seconds_per_token=2 * COSTLY * 0.01)
    quick = _candidate("quick", "forward")
    shares.charge("slow", "slow", 1.0)
    assert _names(choose_passes([slow, quick], shares, 1000, 60.0)) == ["quick"]
    shares.charge("quick", "quick", 2.0)
    assert _names(choose_passes([slow, quick], shares, 1000, 60.0)) == ["slow", "slow"]


def test_what_is_usual_is_not_for_one_owner_to_say() -> None:
    shares = Shares()
    for _ in range(10):
        shares.measured("base", "kind", 100, 0.01)
        shares.measured("base", "rude", 1, 1.0)
    assert shares.usual_seconds("base", 100) == pytest.approx(0.01)


def test_steps_alternate_between_owners_and_are_few_enough_to_wait_for() -> None:
    crowd = [_candidate(f"c{n}", "optim_step", owner="crowd") for n in range(100)]
    neighbours = [_candidate("x", "optim_step"), _candidate("y", "optim_step")]
    chosen = _names(choose_steps([*crowd, *neighbours], Shares()))
    assert set(chosen[:3]) == {"c0", "x", "y"} and len(chosen) == STEPS_AT_ONCE


def test_one_owners_saves_and_loads_run_a_few_at_a_time() -> None:
    crowd = [_candidate(f"c{n}", "save_weights", owner="crowd") for n in range(50)]
    crowd += [_candidate(f"l{n}", "forward", owner="crowd", is_loaded=False) for n in range(50)]
    neighbour = _candidate("n", "load_weights")
    moves = _choose([*crowd, neighbour]).moves
    assert len(moves) == SINGLES_OF_OWNER + 1 and (neighbour, Move.SINGLE) in moves
    busy = UnderWay(is_idle=False, singles_of={"crowd": SINGLES_OF_OWNER})
    assert list(_choose([*crowd, neighbour], busy).moves) == [(neighbour, Move.SINGLE)]


def test_few_snapshots_are_under_way_at_a_time() -> None:
    models = [_candidate(f"m{n}", is_snapshot_due=True) for n in range(5)]
    assert [move for _, move in _choose(models).moves] == [Move.SNAPSHOT] * SAVING_AT_ONCE


def test_nothing_is_chosen_beside_what_must_run_alone() -> None:
    under_way = UnderWay(is_idle=False, is_alone=True)
    assert _choose([_candidate("a", "forward")], under_way) == Choice()


@pytest.mark.parametrize("kind", ["forward_backward", "optim_step", "save_weights"])
def test_a_suspect_waits_until_nothing_is_under_way_and_then_runs_alone(kind: str) -> None:
    suspect = Candidate(
        model="s", model_id="s", owner="s", base_model="base", front=[_operation(1, kind, 10, 2)]
    )
    others = [_candidate("a", "forward"), _candidate("b", "optim_step")]
    assert _choose([*others, suspect], UnderWay(is_idle=False)) == Choice()
    choice = _choose([*others, suspect])
    assert choice.is_alone
    assert len(choice.moves) + len(choice.steps) + len(choice.passes) == 1


@pytest.mark.parametrize(
    ("candidate", "move"),
    [
        (_candidate("a", "forward", is_failed=True), Move.FAIL),
        (_candidate("a", "forward", is_loaded=False), Move.LOAD),
        (_candidate("a", "forward", is_snapshot_due=True), Move.SNAPSHOT),
        (_candidate("a", "forward"), None),
        (_candidate("a", "optim_step"), None),
        (_candidate("a", "save_weights"), Move.SINGLE),
        (_candidate("a", wants_unload=True), Move.UNLOAD),
        (_candidate("a", wants_unload=True, is_loaded=False), None),
        (_candidate("a"), None),
    ],
)
def test_each_model_has_one_next_move(candidate: Candidate[str], move: Move | None) -> None:
    assert next_move(candidate) is move


def test_an_owner_with_passes_under_way_begins_no_others_beside_them() -> None:
    ready = [_candidate("a", "forward_backward", owner="ann"), _candidate("b", "forward_backward")]
    under_way = UnderWay(is_idle=False, owners_passing=frozenset({"ann"}))
    assert [candidate.model for candidate in _choose(ready, under_way).passes] == ["b"]
    assert not _choose(ready, UnderWay(is_idle=False, may_pass=False)).passes


def test_a_step_waits_for_the_batch_that_its_model_had_a_part_in() -> None:
    first, other = _candidate("a", "optim_step", is_in_batch=True), _candidate("b", "optim_step")
    assert _names(_choose([first, other], UnderWay(is_idle=False)).steps) == ["b"]
    saving = _candidate("a", "save_weights", is_in_batch=True)
    assert [move for _, move in _choose([saving], UnderWay(is_idle=False)).moves] == [Move.SINGLE]


def test_steps_that_wait_for_others_go_before_a_batch_of_passes() -> None:
    stepping, passing = _candidate("a", "optim_step"), _candidate("b", "forward_backward")
    choice = _choose([stepping, passing], UnderWay(is_idle=False, has_steps=True))
    assert not choice.steps and not choice.passes, "behind the batch the step would be late"
    choice = _choose([stepping, passing])
    assert (_names(choice.steps), _names(choice.passes)) == (["a"], ["b"])
    choice = _choose([passing], UnderWay(is_idle=False, has_steps=True))
    assert _names(choice.passes) == ["b"]
