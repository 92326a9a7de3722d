"""The unmodified official client on a server whose weights are in an S3 bucket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.object_storage import (  # noqa: F401  # a fixture
    S3Server,
    environment,
    s3_server,
)

if TYPE_CHECKING:
    from tests.support.server_process import StartServer

STEPS = "12"


@pytest.fixture
def storage_options(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811  # the fixture
    for variable, value in environment(s3_server.port).items():
        monkeypatch.setenv(variable, value)
    return ["--storage", s3_server.new_place()]


def test_a_killed_server_with_an_empty_cache_loses_nothing_that_it_answered(
    start_server: StartServer, storage_options: list[str]
) -> None:
    """Killed while snapshots are being uploaded, one after each step."""
    slow = ["--set", "fake_pass_seconds=0.1", "--set", "snapshot_steps=1"]
    server = start_server(*slow, *storage_options)
    undisturbed = server.run("long_training.py", STEPS).splitlines()
    child = server.start_script("long_training.py", STEPS)
    lines = child.out.take(4)
    server.kill()
    shutil.rmtree(server.data_dir / "cache")
    time.sleep(0.5)
    server.start()
    rest, errors = child.finish(90)
    assert child.process.returncode == 0, errors + server.log()
    assert lines + rest.splitlines() == undisturbed


def test_the_official_command_line_downloads_from_the_bucket(
    start_server: StartServer, storage_options: list[str], tmp_path: Path
) -> None:
    server = start_server(*storage_options)
    state = server.run("save_state.py").strip()
    command = [str(Path(sys.executable).with_name("tinker")), "-f", "json"]
    command += ["checkpoint", "download", state, "--output", str(tmp_path / "out")]
    ours = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **ours}, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(json.loads(done.stdout)["destination"])
    assert json.loads((folder / "adapter_config.json").read_bytes())["kind"] == "sampler"
    assert (folder / "state.npz").stat().st_size > 0
