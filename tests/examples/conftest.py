"""A server on the fake engine whose model is named after a tokenizer's folder.

The SDK loads the tokenizer of a model whose name is a folder from there, so that examples run
without a hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import byte_tokenizer, server_process


@dataclass(frozen=True)
class Server:
    url: str
    key: str
    model: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_process.serving(
        tmp_path_factory.mktemp("server"), "--model", str(model)
    ) as running:
        yield Server(running.url, running.key, str(model))
