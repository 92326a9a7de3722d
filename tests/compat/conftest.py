"""Fixtures for driving our server with the official client, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos import tiny_model as tiny_model_files
from tests.support.server_process import LOCAL_SCRIPTS, ServerProcess, StartServer, serving

REPOSITORY = Path(__file__).parents[2]


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One on the fake engine for a whole module, whose tests look at nothing but their own."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def official_release() -> Callable[[str], str]:
    """Gives the interpreter of an environment with that release, made once per machine."""
    return _release_environment


def _release_environment(version: str) -> str:
    """The release with what it requires: of that, pip installs what the tests' own environment
    does not have."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    environment = cache / "tinsmith-tests" / f"tinker-{version}-{sys.version_info.minor}"
    python = environment / "bin" / "python"
    finished = environment / "finished"
    if not finished.exists():
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # Each time: the tests may run from another clone than the last.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if not finished.exists():
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
        with serving(folder, *_local_options(tiny_model)) as server:
            server.script_environment = LOCAL_SCRIPTS
            yield server

    return serve


def _local_options(model: Path) -> tuple[str, ...]:
    engine = ("--engine", "local", "--device", "cpu", "--deterministic")
    return (*engine, "--model", f"{TINY}={model}")
