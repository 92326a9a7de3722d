"""docs/differences.md names tests that exist, and names that we offer."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "differences.md").read_text()


def test_every_difference_names_a_test_that_exists() -> None:
    """S115"""
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!what |---)", line)]
    assert len(rows) > 30
    for row in rows:
        last = row.rstrip(" |").rpartition("|")[2].strip()
        tests = re.findall(r"`(tests/[\w/]+\.py)`", last)
        assert tests or last == "–", row
        assert all((ROOT / path).exists() for path in tests), row


def test_every_addition_is_offered() -> None:
    import tinsmith

    table = PAGE.partition("## What we add")[2]
    for owner, name in re.findall(r"`(\w+Client|APIFuture|ModelInput)\.(\w+)`", table):
        assert hasattr(getattr(tinsmith, owner), name), f"{owner}.{name}"
    for name in ("as_completed", "ClientConfig", "request_tags", "Recovery", "regularizers"):
        assert f"`{name}" in table and hasattr(tinsmith, name)
