"""Ray's head is lost and the cluster started anew under a server. Run by `make cluster`."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.ray_nodes import ray_nodes
from tests.engine.ray.test_cluster import (
    STEPS,
    engine_of,
    official_client,
    readyz,
    status,
    until,
)
from tests.support.engine_calls import write_tiny_model
from tests.support.server_process import ServerProcess, clean_environment

pytest.importorskip("ray", reason="Ray is not installed")


def test_engines_go_on_without_the_head_and_are_placed_again_in_the_next_cluster(
    tmp_path: Path,
) -> None:
    """The official client notices nothing of either, bit for bit."""
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    with ray_nodes(1, clean_environment()) as nodes:
        server = ServerProcess(
            tmp_path / "data",
            *("--engine", "local", "--model", f"tiny={model}", "--device", "cpu"),
            *("--deterministic", "--cluster", nodes.address),
            environment=nodes.environment,
        )
        try:
            server.start()
            with official_client(server) as calm:
                expected = [calm.step() for _ in range(STEPS)]
            with official_client(server) as client:
                results = [client.step() for _ in range(STEPS // 3)]
                engine = engine_of(server)
                nodes.kill_head()
                until(lambda: "placement" in readyz(server))
                assert status(server)["trouble"]
                results += [client.step() for _ in range(STEPS // 3)]
                assert engine_of(server) == engine
                nodes.start_anew()
                until(lambda: status(server)["trouble"] == "")
                until(lambda: [slot["restarts"] for slot in status(server)["slots"]] == [1])
                results += [client.step() for _ in range(STEPS - len(results))]
            assert results == expected
            assert engine_of(server) != engine
        finally:
            server.stop()
