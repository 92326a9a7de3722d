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

from history.checker import violations
from tests.compat.test_replicas import LEASE_SECONDS, new_database, role_of
from tests.support.child import Child, ended_well
from tests.support.listening_proxy import ListeningProxy
from tests.support.object_storage import (  # noqa: F401  # a fixture
    S3Server,
    environment,
    s3_server,
)
from tests.support.server_process import SCRIPTS, ServerProcess

if TYPE_CHECKING:
    from tests.support.server_process import StartServer

STEPS = "12"


@pytest.fixture
def storage_options(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811  # the fixture
    for variable, value in environment(s3_server.port).items():
        monkeypatch.setenv(variable, value)
    return ["--storage", s3_server.new_place()]


@pytest.mark.slow
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
    assert ended_well(child.process.returncode, errors), errors + server.log()
    assert lines + rest.splitlines() == undisturbed


@pytest.mark.slow
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
    assert ended_well(done.returncode, done.stderr), done.stdout + done.stderr
    folder = Path(json.loads(done.stdout)["destination"])
    assert json.loads((folder / "adapter_config.json").read_bytes())
    weights = [file for file in folder.iterdir() if file.suffix in (".npz", ".safetensors")]
    assert weights and all(file.stat().st_size > 0 for file in weights)


@pytest.mark.slow
def test_servers_that_share_nothing_but_a_database_and_a_bucket_take_over_from_each_other(
    storage_options: list[str], tmp_path: Path
) -> None:
    """Each with a data folder of its own, as on machines without a file system in common."""
    database = new_database()
    options = ["--database-url", database.url, "--set", f"lease_seconds={LEASE_SECONDS}"]
    options += ["--set", "fake_pass_seconds=0.1", "--set", "snapshot_steps=2", *storage_options]
    folders = [tmp_path / name / "data" for name in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    first, second = (ServerProcess(folder, *options) for folder in folders)
    try:
        first.start()
        (tmp_path / "other" / "key").write_text(first.key)
        second.start()
        assert (role_of(first), role_of(second)) == ("leader", "follower")
        with ListeningProxy([first.port, second.port]) as proxy:

            def train() -> Child:
                ours = {"PYTHONPATH": "", "TINKER_BASE_URL": proxy.url}
                environment = first.environment | ours | first.script_environment
                script = str(SCRIPTS / "long_training.py")
                return Child([sys.executable, script, STEPS], env=environment)

            undisturbed, errors = train().finish(90)
            assert undisturbed.count("step") == int(STEPS), errors + first.log()
            child = train()
            lines = child.out.take(4)
            first.kill()
            shutil.rmtree(first.data_dir)
            rest, errors = child.finish(90)
            assert lines + rest.splitlines() == undisturbed.splitlines(), errors + second.log()
            assert violations(proxy.history.calls) == []
        assert role_of(second) == "leader"
    finally:
        for server in (first, second):
            if server.process is not None:
                server.stop()
        database.close()
