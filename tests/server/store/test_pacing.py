"""When the next commit begins."""

from __future__ import annotations

from tinsmith.server.store.pacing import APART_SECONDS, MANY, Pacing


def test_the_first_write_is_committed_at_once() -> None:
    assert Pacing().wait(1000.0) == 0.0


def test_a_program_that_waits_for_each_answer_is_never_held_up() -> None:
    """A request is two writes, its record and its end, and takes more than two milliseconds."""
    pacing = Pacing()
    assert _paced(pacing, every=0.0012, seconds=1.0) == []


def test_where_many_write_each_commit_carries_what_came_in_a_few_milliseconds() -> None:
    pacing, at, sizes = Pacing(), 0.0, []
    for _ in range(200):
        waited = pacing.wait(at)
        assert waited <= APART_SECONDS
        sizes.append(1 + int(waited * 2 * MANY))
        pacing.begin(sizes[-1], at + waited)
        at += waited + 1 / (2 * MANY)
    assert sizes[0] == 1
    assert sizes[-1] >= APART_SECONDS * 2 * MANY - 1


def test_several_programs_that_wait_for_their_answers_are_not_slowed_below_many() -> None:
    """Held up they write less often, and then are not held up."""
    pacing, at, count = Pacing(), 0.0, 0
    while at < 1.0:
        at += pacing.wait(at)
        pacing.begin(3, at)
        count += 3
        at += 0.001
    assert count >= 0.9 * MANY


def test_a_burst_holds_nobody_up_for_long() -> None:
    pacing = Pacing()
    pacing.begin(MANY, 0.0)
    assert pacing.wait(0.001) > 0
    assert pacing.wait(APART_SECONDS) == 0.0
    pacing.begin(1, 0.2)
    assert pacing.wait(0.201) == 0.0


def _paced(pacing: Pacing, *, every: float, seconds: float) -> list[float]:
    """The pauses that were not nothing, of one write after the other."""
    pauses, at = [], 0.0
    while at < seconds:
        pauses.append(pacing.wait(at))
        pacing.begin(1, at)
        at += every
    return [pause for pause in pauses if pause]
