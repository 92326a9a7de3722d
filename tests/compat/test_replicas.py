"""Two servers of one Postgres and one folder, behind a proxy that deals connections out in turns:
the unmodified official client notices nothing of what happens to either."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from chaos.machinery import Postgres
from history.checker import violations
from tests.compat.test_kill import loss_curves
from tests.support.child import Child, ended_well
from tests.support.listening_proxy import ListeningProxy
from tests.support.server_process import SCRIPTS, ServerProcess

STEPS = "10"
LEASE_SECONDS = 2.0

pytestmark = pytest.mark.slow


class Pair:
    """Two servers and the proxy before them."""

    def __init__(self, servers: list[ServerProcess], proxy: ListeningProxy) -> None:
        self.servers = servers
        self.proxy = proxy
        self.undisturbed: list[str] = []

    def train(self) -> Child:
        ours = {"PYTHONPATH": "", "TINKER_BASE_URL": self.proxy.url, "TINKER_TELEMETRY": "1"}
        environment = self.servers[0].environment | ours | self.servers[0].script_environment
        return Child([sys.executable, str(SCRIPTS / "long_training.py"), STEPS], env=environment)

    def by_role(self) -> tuple[ServerProcess, ServerProcess]:
        """The one that leads, and the other; waits until one does."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            roles = [role_of(server) for server in self.servers]
            if sorted(roles) == ["follower", "leader"]:
                first, second = self.servers
                return (first, second) if roles[0] == "leader" else (second, first)
            time.sleep(0.05)
        raise AssertionError(f"{roles}: {self.servers[0].log()}")

    def check(self, child: Child, lines: list[str]) -> None:
        """The client has ended well, with what it would have had undisturbed, each thing once."""
        rest, errors = child.finish(120)
        assert ended_well(child.process.returncode, errors), errors + self.servers[0].log()
        assert lines + rest.splitlines() == self.undisturbed
        curves = loss_curves(self.servers[0])
        assert all(curve == curves[0] for curve in curves), "no gap, and no point twice"
        assert violations(self.proxy.history.calls) == []


def _wait_until_leads(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while role_of(server) != "leader":
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


def role_of(server: ServerProcess) -> str:
    try:
        with urllib.request.urlopen(f"{server.url}/readyz", timeout=10) as answer:
            return str(json.load(answer)["role"])
    except urllib.error.HTTPError as error:
        error.close()
        return "not ready"


def new_database() -> Postgres:
    """A Postgres of its own for servers that the official client uses."""
    pytest.importorskip("tinker", reason="the official client is not installed")
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("Postgres is not installed (Debian: apt install postgresql)")
    database = Postgres()
    database.start()
    return database


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    database = new_database()
    data = tmp_path_factory.mktemp("replicas") / "data"
    data.mkdir()
    options = ["--database-url", database.url, "--set", f"lease_seconds={LEASE_SECONDS}"]
    options += ["--set", "fake_pass_seconds=0.1", "--set", "snapshot_steps=4"]
    servers = [ServerProcess(data, *options).start() for _ in range(2)]
    try:
        with ListeningProxy([server.port for server in servers]) as proxy:
            pair = Pair(servers, proxy)
            child = pair.train()
            out, errors = child.finish(120)
            assert ended_well(child.process.returncode, errors), errors + servers[0].log()
            pair.undisturbed = out.splitlines()
            yield pair
    finally:
        for server in servers:
            server.stop()
        database.close()


def nginx(pair: Pair, folder: Path, port: int) -> list[str]:
    """The command that runs it with the configuration of the guide."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed (Debian: apt install nginx-light)")
    text = _of_the_guide("nginx.conf", pair, port)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/errors;\n"
        + text.replace("http {", f"http {{ access_log off; client_body_temp_path {folder}/body;", 1)
    )
    return [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(pair: Pair, folder: Path, port: int) -> list[str]:
    """The same of Caddy, without its own port for orders."""
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("Caddy is not installed (Debian: apt install caddy)")
    (folder / "Caddyfile").write_text(
        "{\n\tadmin off\n}\n" + _of_the_guide("Caddyfile", pair, port)
    )
    return [program, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def _of_the_guide(title: str, pair: Pair, port: int) -> str:
    """An example of the guide, with the ports of this run."""
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "several-servers.md"
    found = re.search(rf"```text title=\"{title}\"\n(.*?)```", guide.read_text(), re.DOTALL)
    assert found is not None
    ports = {"8001": pair.servers[0].port, "8002": pair.servers[1].port, "8000": port}
    return re.sub(r"127\.0\.0\.1:(\d+)", lambda m: f"127.0.0.1:{ports[m[1]]}", found[1])


@pytest.mark.parametrize("balancer", [nginx, caddy])
def test_a_balancer_with_the_configuration_of_the_guide_needs_not_know_who_leads_or_lives(
    balancer: Callable[[Pair, Path, int], list[str]], pair: Pair, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        balancer(pair, tmp_path, port),
        env=os.environ | {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, follower = pair.by_role()
    before = _forwarded(follower)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}/api/v1",
            headers={"x-api-key": pair.servers[0].key},
            transport=httpx.HTTPTransport(retries=8),
        ) as api:

            def ask() -> None:
                for _ in range(10):
                    assert api.get("/training_runs").status_code == 200
                    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
                    assert api.post("/create_session", json=body).status_code == 200

            ask()
            assert _forwarded(follower) > before, "the other server was asked, too"
            follower.kill()
            ask()
    finally:
        process.terminate()
        process.wait(30)
    follower.start()


def _forwarded(server: ServerProcess) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(
        float(n) for n in re.findall(r"^tinsmith_forwarded_requests_total (\S+)", text, re.M)
    )


def test_killing_and_stopping_the_server_that_leads_cost_a_client_nothing_but_time(
    pair: Pair,
) -> None:
    first, second = pair.by_role()
    child = pair.train()
    lines = child.out.take(2)
    first.kill()
    lines += child.out.take(1)
    first.start()
    assert pair.by_role() == (second, first), "the next start follows"
    assert second.stop() == 0, "it hands over"
    lines += child.out.take(1)
    second.start()
    pair.check(child, lines)
    assert pair.by_role() == (first, second)


def test_a_server_that_was_stopped_past_its_lease_and_wakes_doubles_nothing(pair: Pair) -> None:
    leader, follower = pair.by_role()
    child = pair.train()
    lines = child.out.take(2)
    assert leader.process is not None
    os.kill(leader.process.pid, signal.SIGSTOP)
    try:
        _wait_until_leads(follower)
    finally:
        os.kill(leader.process.pid, signal.SIGCONT)
    pair.check(child, lines)
    assert pair.by_role() == (follower, leader), "it goes on as one that follows"
    assert "another server has taken over" in leader.log()
    assert "wait: another server" not in leader.log(), "it is said once, not for every model"
