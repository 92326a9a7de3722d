"""A small request costs little: under a second of processor time, and memory as stated for it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("costly_requests.py")
REQUESTS = runpy.run_path(str(SCRIPT))["REQUESTS"]
MAX_CPU_SECONDS = 1.0
MB = 1_000_000


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_costs_no_more_than_is_stated(name: str) -> None:
    verdict, cpu_seconds, grown = _output(str(SCRIPT), name).split()
    allowed_mb = REQUESTS[name][2]
    assert float(cpu_seconds) < MAX_CPU_SECONDS, f"{verdict} after {cpu_seconds} s"
    assert int(grown) < allowed_mb * MB, f"{verdict}, with {int(grown) / MB:.0f} MB"


def test_names_whose_hashes_collide_cannot_be_prepared() -> None:
    """Texts hash with a secret that each process draws anew."""
    assert _output("-c", "print(hash('model_id'))") != _output("-c", "print(hash('model_id'))")


def _output(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
