"""Tests of servers on a Ray cluster that loses nodes: `pytest -p tests.support.on_cluster`.

Every server that a test starts has its engine on one of three nodes of this machine: the local
engine with the tiny model, where a test did not care. Once in each server's life, when it has done
some work, the node of its engine is lost and another joins. The tests are not told.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaos import ray_nodes, tiny_model
from tests.support import server_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server_process import ServerProcess

NUM_NODES = 3
CORES = 2
"""Of each node: an engine of two ranks has room."""

SCRIPTS = {"PROMPT_SECONDS": "60", "NEW_TOKENS": "100"}
"""What scripts are told of all servers: to be patient where they are to hear of a mistake at once,
for the node may be lost of the engine that is to look at it, and that the context is short."""

WORK = 3
"""Operations and samples after which a server loses the node of its engine."""

NOT_HERE = {"test_rolling_upgrade.py": "servers of two releases, and nodes with engines of one"}
"""Files of tests that are not for a cluster, and why."""


class OnCluster:
    def __init__(self, nodes: ray_nodes.RayNodes, model: Path) -> None:
        self._nodes = nodes
        self._model = model
        self._turn = threading.Lock()
        self._seen: set[Path] = set()
        self.num_lost = 0

    @property
    def environment(self) -> dict[str, str]:
        """With what a test has set for its servers since the nodes were started."""
        of_ray = {k: v for k, v in self._nodes.environment.items() if k.startswith("RAY_")}
        return server_process.clean_environment() | of_ray

    def options(self, server: ServerProcess) -> list[str]:
        """What the server is started with; from then on somebody looks how much it has done."""
        options = [*server.options, "--cluster", self._nodes.address]
        if "--engine" not in server.options:
            local = ["--engine", "local", "--device", "cpu", "--deterministic"]
            options += [*local, "--model", f"tiny={self._model}"]
            server.script_environment = server_process.LOCAL_SCRIPTS
        server.script_environment = server.script_environment | SCRIPTS
        return options

    def started(self, server: ServerProcess) -> None:
        if server.data_dir not in self._seen:
            self._seen.add(server.data_dir)
            threading.Thread(target=self._lose_a_node, args=[server], daemon=True).start()

    def engines(self, server: ServerProcess) -> list[int]:
        return ray_nodes.engines(server.data_dir)

    def _lose_a_node(self, server: ServerProcess) -> None:
        assert server.process is not None
        while _work(server) < WORK:
            if server.process.poll() is not None:
                return
            time.sleep(0.1)
        with self._turn:
            for engine in self.engines(server)[:1]:
                # The server may have been stopped, and its engine gone, since.
                with contextlib.suppress(OSError):
                    self._nodes.lose_node_of(engine)
                    self._nodes.add()
                    self.num_lost += 1


def _work(server: ServerProcess) -> int:
    """How many operations and samples the server has carried out."""
    try:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return 0
    pattern = r"^tinsmith_(?:operations|samples)_total\{[^}]*\} (\S+)"
    return int(sum(map(float, re.findall(pattern, text, re.MULTILINE))))


@contextlib.contextmanager
def _cluster() -> Iterator[OnCluster]:
    environment = server_process.clean_environment()
    with (
        tempfile.TemporaryDirectory() as folder,
        ray_nodes.ray_nodes(NUM_NODES, environment, CORES) as nodes,
    ):
        tiny_model.build(Path(folder))
        yield OnCluster(nodes, Path(folder))


_stack = contextlib.ExitStack()


def pytest_sessionstart() -> None:
    server_process.ServerProcess.cluster = _stack.enter_context(_cluster())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := NOT_HERE.get(item.path.name):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cluster = server_process.ServerProcess.cluster
    assert isinstance(cluster, OnCluster)
    terminalreporter.write_line(f"{cluster.num_lost} nodes were lost under the servers of tests")


def pytest_unconfigure() -> None:
    _stack.close()
