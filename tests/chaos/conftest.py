"""The tiny model that chaos tests train."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from chaos import tiny_model as tiny_model_files


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the local engine needs torch")
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model_files.build(folder)
    return folder
