"""The cluster that `make cluster` puts under the servers of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.ray_nodes import RayNodes
from tests.support.on_cluster import OnCluster


def test_a_server_on_the_cluster_sees_what_its_test_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its object storage is, say, which is started long after the nodes."""
    ours = {"RAY_AUTH_TOKEN": "secret", "AWS_REGION": "nowhere"}
    nodes = RayNodes("", [], ours, process=None)  # type: ignore[arg-type]  # not asked
    monkeypatch.setenv("AWS_REGION", "here")
    found = OnCluster(nodes, Path()).environment
    assert (found["AWS_REGION"], found["RAY_AUTH_TOKEN"]) == ("here", "secret")
