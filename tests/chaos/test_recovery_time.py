"""A killed server is ready again soon, and its models are what they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recovery.py"


@pytest.mark.slow
def test_a_killed_server_is_ready_again_within_ten_seconds_plus_replay() -> None:
    """The measure of `benchmarks/recovery.py` made small, on the fake engine."""
    command = [sys.executable, str(SCRIPT), "--engine", "fake"]
    finished = subprocess.run(
        [*command, "--models", "20", "--operations", "200"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)["result"]
    assert result["same_bits"]
    assert result["ready_after_kill_s"] < 10
    assert result["all_models_rebuilt_and_answered_after_kill_s"] < 10 + result["training_s"]
