"""The public signatures, as a strict type checker sees them.

S29: annotations state the real types. A change of one makes a line of `typed_surface.py` fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def mypy(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, files)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_the_public_signatures_are_what_users_rely_on() -> None:
    checked = mypy(Path(__file__).with_name("typed_surface.py"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_every_example_passes_the_strict_check() -> None:
    checked = mypy(*sorted((ROOT / "examples").glob("*.py")))
    assert checked.returncode == 0, checked.stdout + checked.stderr
