"""Ray's own autoscaler sees what slots wait for, and brings nodes. Run by `make cluster`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.ray_nodes import engines, ray_nodes
from tests.engine.ray.test_cluster import readyz, status, until
from tests.support.engine_calls import write_tiny_model
from tests.support.server_process import ServerProcess, clean_environment

pytest.importorskip("ray", reason="Ray is not installed")


def test_a_node_is_brought_for_each_slot_that_waits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    with ray_nodes(0, clean_environment(), num_spare=2) as nodes:
        server = ServerProcess(
            tmp_path / "data",
            *("--engine", "local", "--model", f"tiny={model}", "--device", "cpu"),
            *("--cluster", nodes.address, "--engines", "2"),
            environment=nodes.environment,
        )
        try:
            server.start()
            until(lambda: [slot["state"] for slot in status(server)["slots"]] == ["up", "up"])
            assert len(engines(server.data_dir)) == 2
            cores = [node["cpus"] for node in status(server)["nodes"] if node["is_alive"]]
            assert sorted(cores) == [0, 1, 1], "the head, and a node for each engine"
            assert "placement" not in readyz(server)
        finally:
            server.stop()
    # All ends with the cluster.
    until(lambda: not any(processes_of(nodes.environment["RAY_TMPDIR"])), 10)


def processes_of(folder: str) -> Iterator[str]:
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        # Processes end while we look.
        with contextlib.suppress(OSError):
            words = each.read_text()
            if f"={folder}/" in words:
                yield words
