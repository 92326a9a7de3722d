"""One owner, or a stranger, misbehaves; an innocent tenant's requests are hardly slower.

The real thing is `make bench PARTS=neighbours`: every attack, on the local engine, for longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parents[2] / "benchmarks" / "neighbours.py"
BOUND = 10.0
"""Times the p99 without the attack, or beside another program that computes as much. The aim is 3,
on a quiet machine; without bounds it was 40."""

NOISE_MS = 50.0
"""What a request may wait for the machine's other tests."""

TRIES = 3
"""The machine may be busy with other tests."""


def _run(attack: str) -> dict[str, Any]:
    command = [sys.executable, str(DRIVER), "--engine", "fake", "--seconds", "3"]
    done = subprocess.run(
        [*command, "--attacks", attack], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)["result"][attack]
    return found


def _is_bearable(figures: dict[str, float]) -> bool:
    before = max(NOISE_MS, figures["quiet_p99_ms"], figures["elsewhere_p99_ms"])
    return figures["p99_ms"] <= BOUND * before


@pytest.mark.parametrize(
    "attack", ["idle_sockets", "endless_header", "big_metadata", "big_json", "stop_strings"]
)
def test_a_neighbour_hardly_feels_it(attack: str) -> None:
    for _ in range(TRIES):
        found = _run(attack)
        assert found["failure"] is None
        assert found["server_memory_grown_mb"] < 400
        if all(map(_is_bearable, found["kinds"].values())):
            return
    raise AssertionError(found)
