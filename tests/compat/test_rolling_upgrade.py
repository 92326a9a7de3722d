"""Servers of two releases side by side, on one Postgres, under the unmodified official client.

The earlier release is a commit of the past, whose package is run as it was. The later one is this
source with one more step of the tables, as the next release may have it.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from history.checker import violations
from tests.compat.test_replicas import LEASE_SECONDS, STEPS, new_database, role_of
from tests.support.child import Child
from tests.support.listening_proxy import ListeningProxy
from tests.support.server_process import SCRIPTS, ServerProcess, clean_environment

EARLIER = "49b9c0a"
"""A commit that knows leases, and no step of the tables after theirs."""

ROOT = Path(__file__).parents[2]
STEP = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("of_the_next_release", sa.Integer(), nullable=True))
"""

pytestmark = pytest.mark.slow


def earlier_package(folder: Path) -> Path:
    found = subprocess.run(
        ["git", "-C", str(ROOT), "archive", EARLIER, "src"], capture_output=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"the history has no commit {EARLIER}: {found.stderr.decode()[-200:]}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def later_package(folder: Path) -> Path:
    shutil.copytree(ROOT / "src", folder / "src")
    steps = folder / "src" / "tinsmith" / "server" / "store" / "migrations" / "versions"
    before = max(step.name[:4] for step in steps.glob("[0-9]*.py"))
    (steps / "9999_next.py").write_text(STEP.format(before=before))
    return folder / "src"


def version_of(url: str) -> str:
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    return str(found)


def wait_until(condition: Callable[[], bool], server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


def status_of(server: ServerProcess) -> int:
    request = urllib.request.Request(
        f"{server.url}/api/v1/training_runs", headers={"x-api-key": server.key}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_client_trains_on_while_servers_of_the_next_release_replace_those_of_the_last(
    tmp_path: Path,
) -> None:
    packages = earlier_package(tmp_path / "old"), later_package(tmp_path / "new")
    database = new_database()
    data = tmp_path / "data"
    data.mkdir()
    options = ["--database-url", database.url, "--set", f"lease_seconds={LEASE_SECONDS}"]
    options += ["--set", "fake_pass_seconds=0.1", "--set", "snapshot_steps=4"]
    old, new = (
        ServerProcess(
            data, *options, environment=clean_environment() | {"PYTHONPATH": str(package)}
        )
        for package in packages
    )

    def train(url: str) -> Child:
        environment = old.environment | {"PYTHONPATH": "", "TINKER_BASE_URL": url}
        return Child([sys.executable, str(SCRIPTS / "long_training.py"), STEPS], env=environment)

    try:
        old.start()
        before = version_of(database.url)
        undisturbed, errors = train(old.url).finish(120)
        assert undisturbed.count("step") == int(STEPS), errors + old.log()
        new.start()
        assert (role_of(old), role_of(new)) == ("leader", "follower")
        assert version_of(database.url) == before, "the tables are the older one's while it leads"
        with ListeningProxy([old.port, new.port]) as proxy:
            child = train(proxy.url)
            lines = child.out.take(2)
            assert old.stop() == 0
            lines += child.out.take(1)
            assert version_of(database.url) == "9999", "the newer one has brought them up to date"
            old.start()
            assert (role_of(old), role_of(new)) == ("follower", "leader")
            rest, errors = child.finish(120)
            assert lines + rest.splitlines() == undisturbed.splitlines(), errors + old.log()
            assert violations(proxy.history.calls) == []
        new.kill()
        wait_until(lambda: "cannot take over" in old.log(), old)
        new.start()
        wait_until(lambda: role_of(new) == "leader", new)
        assert status_of(old) == 200, "it still passes requests on"
    finally:
        for server in (old, new):
            if server.process is not None:
                server.stop()
        database.close()
