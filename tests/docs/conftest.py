"""A newcomer's home, and a server in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.newcomer import Served, newcomer


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return newcomer(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def shared_server(
    home: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The environment of clients of a server that was started as the tutorial says."""
    server = Served("tinsmith serve", home, tmp_path_factory.mktemp("server"))
    yield home | server.exports
    server.stop()
