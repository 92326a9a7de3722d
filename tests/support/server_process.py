"""`tinsmith serve` in a process of its own, for tests that need a real server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Protocol

from tests.support.child import Child, ended_well

SCRIPTS = Path(__file__).parents[1] / "compat" / "scripts"

LOCAL_SCRIPTS = {"MODEL": "tiny", "LEARNING_RATE": "0.01", "COUNT": "24"}
"""What scripts are told of a server with the real engine on the tiny model."""

_START_SECONDS = 60


class Elsewhere(Protocol):
    """Where engines of servers run that are not their children."""

    @property
    def environment(self) -> dict[str, str]:
        """The servers' own."""

    def options(self, server: ServerProcess) -> list[str]:
        """What the server is started with."""

    def started(self, server: ServerProcess) -> None:
        """The server is ready."""

    def engines(self, server: ServerProcess) -> list[int]:
        """The processes of its engines, oldest first."""


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[ServerProcess]:
    """A server on the fake engine unless options say otherwise, ready, its data under `folder`."""
    (folder / "data").mkdir(exist_ok=True)
    server = ServerProcess(folder / "data", *options).start()
    try:
        yield server
    finally:
        server.stop()


class ServerProcess:
    """`tinsmith serve` on a free loopback port, in its own process."""

    cluster: ClassVar[Elsewhere | None] = None
    """Set by `tests.support.on_cluster`, for all servers."""

    def __init__(
        self, data_dir: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        """`environment` is the server's own, instead of this process's."""
        self._environment = environment
        self.data_dir = data_dir
        self.options = options
        self.url = ""
        self.key = ""
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.script_environment: dict[str, str] = {}
        """Set for every script that is run against this server."""

    def start(self) -> ServerProcess:
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(self.port)]
        options, environment = list(self.options), clean_environment()
        if self.cluster is not None:
            options, environment = self.cluster.options(self), self.cluster.environment
        elif "--engine" not in options:
            options += ["--engine", "fake"]
        command += ["--data-dir", str(self.data_dir), *options]
        log = (self.data_dir.parent / "server.log").open("a")
        with log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment or environment,
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(r"export TINKER_BASE_URL=(.*)", line):
                self.url = found[1]
                # A restarted server must be found under the same address.
                self.port = int(self.url.rpartition(":")[2])
                break
        else:
            raise AssertionError((self.data_dir.parent / "server.log").read_text())
        key_file = self.data_dir.parent / "key"
        if not key_file.exists():
            match = re.match(r"export TINKER_API_KEY=(.*)", self.process.stdout.readline())
            assert match is not None
            key_file.write_text(match[1])
        self.key = key_file.read_text()
        self._wait_until_ready()
        if self.cluster is not None:
            self.cluster.started(self)
        return self

    def kill(self) -> None:
        """As `kill -9` does: no goodbye."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def engines(self) -> list[int]:
        """The processes of its engines, oldest first."""
        if self.cluster is not None:
            return self.cluster.engines(self)
        assert self.process is not None
        return children(self.process.pid, b"tinsmith.engine.local.boundary.process")

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to use this server and nothing of the developer's."""
        return clean_environment() | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "TINKER_TELEMETRY": "0",
        }

    def run(
        self, script: str, *arguments: str, timeout: float = 120, python: str = sys.executable
    ) -> str:
        """Run an official-client script against this server; its output."""
        child = self.start_script(script, *arguments, python=python)
        out, err = child.finish(timeout)
        code = child.process.returncode
        assert ended_well(code, err), f"exit status {code}\n{out}{err}{self.log()}"
        return out

    def start_script(self, script: str, *arguments: str, python: str = sys.executable) -> Child:
        """`python` may belong to an environment with another release of the official client."""
        # Telemetry is on, as it is in a user's program.
        ours = {"PYTHONPATH": "", "TINKER_TELEMETRY": "1"}
        environment = self.environment | ours | self.script_environment
        return Child([python, str(SCRIPTS / script), *arguments], env=environment)

    def log(self) -> str:
        return (self.data_dir.parent / "server.log").read_text()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                time.sleep(0.05)
        raise AssertionError(f"not ready within {_START_SECONDS} seconds: {self.log()}")


def children(pid: int, module: bytes) -> list[int]:
    """The processes of a module that any thread of a process has started, oldest first."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    pids = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    return sorted(child for child in pids if module in Path(f"/proc/{child}/cmdline").read_bytes())


def clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


StartServer = Callable[..., ServerProcess]
