"""The server under load for a few seconds, with bounds that hold on a busy machine.

The real thing is `make load`: 500 clients, 4,000 held polls, 1,000 requests a second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).parents[2] / "benchmarks" / "load.py"
CLIENTS, POLLS, RATE = 40, 400, 300


def _run(*, seconds: int, beside: str | None = None) -> dict[str, Any]:
    options = {
        "--clients": CLIENTS,
        "--polls": POLLS,
        "--rate": RATE,
        "--seconds": seconds,
        "--token-seconds": 2,
    }
    command = [sys.executable, str(DRIVER)]
    command += [str(part) for option in options.items() for part in option]
    if beside is not None:
        # A slow machine must be too fast as well.
        command += ["--beside", beside, "--set", "key_max_requests_per_second=200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)["result"]
    return found


def test_a_steady_load_is_carried() -> None:
    found = _run(seconds=9)
    assert found["errors"] == {}
    assert found["answers"]["console 200"] > 0
    assert found["polls_outstanding"]["min"] > 0.8 * POLLS
    assert found["requests_per_second"] > 0.6 * RATE
    assert found["latency_ms"]["optim_step"]["p99"] < 1000
    memory = found["server_memory_mb"]
    assert memory["last_third"] < 1.1 * memory["first_third"] + 10
    descriptors = found["server_descriptors"]
    assert descriptors["max"] < descriptors["min"] + 20


@pytest.mark.parametrize("beside", ["large", "silent", "flood"])
def test_somebody_who_means_harm_does_not_stop_the_others(beside: str) -> None:
    found = _run(seconds=6, beside=beside)
    assert found["errors"] == {}
    assert found["harm"], "the harm was done"
    assert found["requests_per_second"] > 0.3 * RATE
    assert found["latency_ms"]["optim_step"]["p90"] < 2000
    if beside == "flood":
        refused = found["harm"]["flood 429"]["count"]
        assert refused > 0, "who sends too fast is told to wait"
