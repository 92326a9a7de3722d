"""Several servers under trouble answer as one that has none; `make simulation` tries more seeds."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.life import SESSIONS, TAKEOVERS, Lived, live

NUM_SEEDS = 6


@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, NUM_SEEDS))],
)
def test_no_trouble_changes_a_result(seed: int) -> None:
    lived = live(seed)
    assert isinstance(lived, Lived), lived
    assert lived.num_operations > 500


@pytest.mark.parametrize("seed", range(2))
def test_servers_that_fail_while_they_take_over_leave_what_the_next_one_can_use(seed: int) -> None:
    lived = live(seed, TAKEOVERS)
    assert isinstance(lived, Lived), lived
    assert not _open_files(), "thousands of lives in one process would have no more left"


def _open_files() -> list[str]:
    """Those of lives that are over; what their first burial frees is buried after the next one."""
    gc.collect()
    fds = Path("/proc/self/fd")
    targets = (
        [str(fd.readlink()) for fd in fds.iterdir() if fd.is_symlink()] if fds.exists() else []
    )
    return [target for target in targets if "tinsmith-life-" in target]


@pytest.mark.parametrize("seed", range(2))
def test_a_lease_that_is_taken_before_its_end_does_no_harm_to_a_holder_that_lives(
    seed: int,
) -> None:
    lived = live(seed, SESSIONS)
    assert isinstance(lived, Lived), lived


def test_a_seed_repeats_its_life_step_by_step_in_any_process() -> None:
    program = f"from tests.simulation.life import live; print(live({NUM_SEEDS}))"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tools")])
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert said.strip() == str(live(NUM_SEEDS))
