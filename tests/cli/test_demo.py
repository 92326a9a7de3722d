"""The demonstration, from beginning to end, on the real small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.cli.persona import OPENING

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


def test_the_model_learns_in_the_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith.cli", "demo", "--json", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    story = json.loads(done.stdout)
    assert len(story["losses"]) == 20
    assert story["losses"][-1] < story["losses"][0] / 4
    assert not any(answer["before"].startswith(OPENING) for answer in story["answers"])
    assert sum(answer["after"].startswith(OPENING) for answer in story["answers"]) >= 3
    assert story["sampler_checkpoint"].endswith("/sampler_weights/pirate")
    assert story["seconds"] < 300
