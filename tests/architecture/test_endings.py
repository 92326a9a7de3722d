"""A test of the official client does not fail because the client's threads abort an ending process.

Gates have failed for that, each time in another test that compared an exit status with 0.
"""

from __future__ import annotations

import ast
import signal
from pathlib import Path

from tests.support.child import ended_well

COMPAT = Path(__file__).parents[1] / "compat"

OTHER_PROGRAMS = {"test_agents.py"}
"""They run no process with the official client."""


def test_what_official_programs_end_with_is_judged_in_one_place() -> None:
    found = {
        file.name
        for file in COMPAT.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert) and "returncode == 0" in ast.unparse(node)
    }
    assert found == OTHER_PROGRAMS


def test_only_a_silent_death_by_its_own_hand_is_let_pass() -> None:
    assert ended_well(0, "a warning")
    assert ended_well(-signal.SIGABRT, "")
    assert not ended_well(-signal.SIGABRT, "Fatal Python error")
    assert not ended_well(1, "")
    assert not ended_well(-signal.SIGKILL, "")
