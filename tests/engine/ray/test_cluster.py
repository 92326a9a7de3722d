"""A server whose engines Ray places, on three real nodes of one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.ray_nodes import RayNodes, engines, parent, ray_nodes
from tests.support.child import Child, ended_well
from tests.support.engine_calls import write_tiny_model
from tests.support.server_process import SCRIPTS, ServerProcess, clean_environment

pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(1, clean_environment()) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def server(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ray")
    model = write_tiny_model(folder / "model")
    (folder / "data").mkdir()
    server = ServerProcess(
        folder / "data",
        *("--engine", "local", "--model", f"tiny={model}", "--device", "cpu", "--deterministic"),
        *("--cluster", nodes.address),
        environment=nodes.environment,
    )
    try:
        yield server.start()
    finally:
        server.stop()


def test_the_official_client_notices_nothing_when_a_node_is_lost(
    nodes: RayNodes, server: ServerProcess
) -> None:
    """The run goes on, bit for bit, on a node that has joined meanwhile."""
    with official_client(server) as calm:
        expected = [calm.step() for _ in range(STEPS)]
    engine = engine_of(server)
    nodes.add()
    with official_client(server) as client:
        results = [client.step() for _ in range(STEPS // 2)]
        lost_at = time.monotonic()
        nodes.lose_node_of(engine)
        results.append(client.step())
        print(f"from the loss of a node to the next step: {time.monotonic() - lost_at:.1f} s")
        results += [client.step() for _ in range(STEPS - len(results))]
    assert results == expected
    assert engine_of(server) != engine
    cluster = status(server)
    assert len(cluster["nodes"]) == 3
    assert [slot["state"] for slot in cluster["slots"]] == ["up"]


def test_engines_go_on_without_a_placer_and_the_next_one_finds_them(
    server: ServerProcess,
) -> None:
    engine, placer = engine_of(server), placer_of(server)
    os.kill(placer, signal.SIGKILL)
    until(lambda: "ended with status -9; next attempt" in server.log())
    with official_client(server) as client:
        assert client.step()
    until(lambda: "placement" not in readyz(server))
    assert placer_of(server) != placer
    assert engine_of(server) == engine
    assert status(server)["trouble"] == ""


class OfficialClient:
    """The official client, which takes a step when told to and prints every bit of it."""

    def __init__(self, server: ServerProcess) -> None:
        command = [sys.executable, str(SCRIPTS / "stepwise.py")]
        environment = server.environment | {"PYTHONPATH": ""}
        self.child = Child(command, env=environment, stdin=subprocess.PIPE)

    def step(self) -> str:
        stdin = self.child.process.stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()
        (line,) = self.child.out.take(1) or [self.child.err.rest()]
        return line


@contextlib.contextmanager
def official_client(server: ServerProcess) -> Iterator[OfficialClient]:
    client = OfficialClient(server)
    try:
        yield client
    finally:
        assert client.child.process.stdin is not None
        client.child.process.stdin.close()
        _, errors = client.child.finish()
    assert ended_well(client.child.process.returncode, errors), errors


def status(server: ServerProcess) -> Any:
    return _ask(server, "/api/v1/cluster")


def readyz(server: ServerProcess) -> Any:
    return _ask(server, "/readyz")


def _ask(server: ServerProcess, path: str) -> Any:
    request = urllib.request.Request(server.url + path, headers={"X-API-Key": server.key})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def engine_of(server: ServerProcess) -> int:
    """The process id of the server's one engine."""
    (engine,) = engines(server.data_dir)
    return engine


def placer_of(server: ServerProcess) -> int:
    assert server.process is not None
    (placer,) = (
        pid
        for pid, words in _processes()
        if "tinsmith.engine.ray.placer" in words and parent(pid) == server.process.pid
    )
    return placer


def _processes() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while we look.
        with contextlib.suppress(OSError):
            yield int(folder.name), (folder / "cmdline").read_text().split("\0")[:-1]


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.1)
