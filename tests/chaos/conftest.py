"""The tiny model that chaos tests train."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "tools" / "chaos"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the local engine needs torch")
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(CHAOS / "tiny_model.py"))["build"](folder)
    return folder
