"""Fixtures for driving our server with the official client, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos import tiny_model as tiny_model_files
from tests.support.child import Child

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]


class ServerProcess:
    """`tinsmith serve` on a free loopback port, in its own process."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        self.options = options
        self.url = ""
        self.key = ""
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.script_environment: dict[str, str] = {}
        """Set for every script that is run against this server."""

    def start(self) -> ServerProcess:
        command = [sys.executable, "-m", "tinsmith.cli", "serve"]
        if "--engine" not in self.options:
            command += ["--engine", "fake"]
        command += ["--port", str(self.port), "--data-dir", str(self.data_dir), *self.options]
        log = (self.data_dir.parent / "server.log").open("a")
        with log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=_clean_environment()
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

    def run(
        self, script: str, *arguments: str, timeout: float = 120, python: str = sys.executable
    ) -> str:
        """Run an official-client script against this server; its output."""
        child = self.start_script(script, *arguments, python=python)
        out, err = child.finish(timeout)
        assert child.process.returncode == 0, out + err + self.log()
        return out

    def start_script(self, script: str, *arguments: str, python: str = sys.executable) -> Child:
        """`python` may belong to an environment with another release of the official client."""
        environment = (
            _clean_environment()
            | {
                "PYTHONPATH": "",
                "TINKER_BASE_URL": self.url,
                "TINKER_API_KEY": self.key,
            }
            | self.script_environment
        )
        return Child([python, str(SCRIPTS / script), *arguments], env=environment)

    def log(self) -> str:
        return (self.data_dir.parent / "server.log").read_text()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                time.sleep(0.05)
        raise AssertionError("the server did not become ready: " + self.log())


def _clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


StartServer = Callable[..., ServerProcess]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[ServerProcess] = []

    def start(*options: str) -> ServerProcess:
        server = ServerProcess(tmp_path / "data", *options)
        (tmp_path / "data").mkdir(exist_ok=True)
        servers.append(server.start())
        return server

    yield start
    for server in servers:
        assert server.process is not None
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def official_release() -> Callable[[str], str]:
    """Gives the interpreter of an environment with that release, made once per machine."""
    return _release_environment


def _release_environment(version: str) -> str:
    """The release with its own dependencies, as a user of it would install them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    environment = cache / "tinsmith-tests" / f"tinker-{version}-{sys.version_info.minor}"
    python = environment / "bin" / "python"
    finished = environment / "finished"
    if not finished.exists():
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        # Our versions, so that nothing changes under the test.
        pins = environment / "constraints.txt"
        lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
        pins.write_text("\n".join(line for line in lines if not line.startswith("tinker==")))
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        installed = subprocess.run(
            [*install, "--no-compile", "-c", str(pins), f"tinker=={version}"],
            capture_output=True,
            text=True,
        )
        if installed.returncode != 0:
            pytest.fail(f"tinker {version} could not be installed: {installed.stderr[-300:]}")
        finished.touch()
    return str(python)


TINY = "tiny"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of 97 tokens, one per character."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the local engine needs torch")
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model_files.build(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return folder


@pytest.fixture
def start_local_server(start_server: StartServer, tiny_model: Path) -> StartServer:
    """A server with the real engine, deterministic, on the tiny model."""

    def start(*options: str) -> ServerProcess:
        server = start_server(*_local_options(tiny_model), *options)
        server.script_environment = LOCAL_SCRIPTS
        return server

    return start


@pytest.fixture(scope="module")
def local_server_in(
    tiny_model: Path,
) -> Callable[[Path], contextlib.AbstractContextManager[ServerProcess]]:
    """The same for a whole module: a server for as long as a `with` block lasts."""

    @contextlib.contextmanager
    def serve(folder: Path) -> Iterator[ServerProcess]:
        (folder / "data").mkdir()
        server = ServerProcess(folder / "data", *_local_options(tiny_model)).start()
        server.script_environment = LOCAL_SCRIPTS
        try:
            yield server
        finally:
            server.stop()

    return serve


LOCAL_SCRIPTS = {"MODEL": TINY, "LEARNING_RATE": "0.01", "COUNT": "1030"}


def _local_options(model: Path) -> tuple[str, ...]:
    engine = ("--engine", "local", "--device", "cpu", "--deterministic")
    return (*engine, "--model", f"{TINY}={model}")
