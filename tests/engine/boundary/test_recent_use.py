"""Who counts as having trained little lately."""

from __future__ import annotations

from tinsmith.engine.local.boundary.recent_use import RecentUse

PASS, LONG_PASS = 0.004, 0.032


def _alone_for_long() -> RecentUse:
    use = RecentUse()
    for _ in range(1000):
        use.add("first", PASS)
    return use


def test_who_is_alone_has_not_had_little() -> None:
    assert not _alone_for_long().is_light(["first"])


def test_who_comes_to_one_that_was_alone_has_had_little_at_once() -> None:
    assert _alone_for_long().is_light(["second"])


def test_who_was_alone_has_had_little_after_a_few_passes_of_a_crowd() -> None:
    """It owes nothing for the time in which nobody else was there."""
    use = _alone_for_long()
    for _ in range(4):
        use.add("crowd", LONG_PASS)
        use.add("first", PASS)
    assert use.is_light(["first"]) and not use.is_light(["crowd"])


def test_who_has_as_much_as_the_other_has_not_had_little() -> None:
    use = _alone_for_long()
    for _ in range(100):
        use.add("second", PASS)
        use.add("first", PASS)
    assert not use.is_light(["first"]) and not use.is_light(["second"])


def test_who_went_long_ago_is_forgotten() -> None:
    use = RecentUse()
    use.add("gone", PASS)
    for _ in range(1000):
        use.add("first", PASS)
    assert not use.is_light(["first"]), "it is alone again"
    for _ in range(4):
        use.add("crowd", LONG_PASS)
    assert use.is_light(["first"])
