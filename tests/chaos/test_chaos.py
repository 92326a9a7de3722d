"""A short chaos run as a test; `make chaos` runs a long one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import machinery

CHAOS = Path(__file__).parents[2] / "tools" / "chaos"


@pytest.mark.slow
@pytest.mark.parametrize(("store", "seed"), [("sqlite", 1), ("postgres", 2)])
def test_nothing_is_lost_whatever_breaks(tiny_model: Path, store: str, seed: int) -> None:
    pytest.importorskip("tinker", reason="the official client is not installed")
    if store == "postgres" and not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("Postgres is not installed (Debian: apt install postgresql)")
    command = [sys.executable, str(CHAOS), "--seed", str(seed), "--store", store]
    command += ["--engines", "2", "--no-memory"] if store == "sqlite" else ["--engines", "1"]
    if store == "postgres":
        pytest.importorskip("obstore", reason="the extra `storage` is not installed")
        command += ["--replicas", "2", "--storage", "s3"]
    finished = subprocess.run(
        [*command, "--minutes", "0.5", "--clients", "4", "--model", str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    counts = {
        name: int(count)
        for count, name in re.findall(r"^ *(\d+) (.+)$", finished.stdout, re.MULTILINE)
    }
    assert counts["final weights compared"] >= 4
    assert counts["clients done"] > 0
    assert counts["calls in the history"] > 200
    assert counts["operations carried out"] > 100
    assert counts["server killed"] > 0
    assert ("engine's MiB after two loops" in counts) == (store == "postgres")


@pytest.mark.parametrize("victim", [machinery.ENGINE, machinery.RANK, machinery.PLACER])
def test_the_process_that_chaos_kills_is_a_module_that_exists(victim: bytes) -> None:
    """It is found by its command line; under a wrong name nothing would ever be killed."""
    assert importlib.util.find_spec(victim.decode()) is not None
