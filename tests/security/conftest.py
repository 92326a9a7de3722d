"""The servers of `tests/server` and `tests/compat`, for those who mean them harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.compat.conftest import ServerProcess
from tests.server.conftest import Api, StartServer, TestServer, api, server, start_server

__all__ = ["Api", "ServerProcess", "StartServer", "TestServer", "api", "server", "start_server"]

settings.register_profile("long", max_examples=2000, deadline=None)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """A server in a process of its own that says all it can in its log."""
    server = ServerProcess(tmp_path / "data", "--log-level", "debug", "--log-format", "json")
    server.start()
    yield server
    server.stop()
