"""What has to be so before a server has its engines placed by Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.assembly import engine_cluster
from tinsmith.engine.ray.config import check_ray
from tinsmith.errors import ValidationError
from tinsmith.server.config_sources import build_config

pytest.importorskip("ray", reason="Ray is not installed")


def test_a_cluster_that_lets_anybody_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    config = build_config({"cluster": "auto", "data_dir": tmp_path})
    with pytest.raises(ValidationError, match="cluster: needs a Ray cluster that asks for a token"):
        engine_cluster(config)
    with pytest.raises(ValidationError, match="RAY_AUTH_MODE=token"):
        check_ray({"RAY_AUTH_MODE": "disabled"})


def test_one_that_asks_for_a_token_is_taken() -> None:
    check_ray({"RAY_AUTH_MODE": "token"})
