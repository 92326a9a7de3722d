"""The servers of `tests/server` and `tests/compat`, for those who mean them harm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.server.conftest import api, server, start_server
from tests.support.server_process import serving

__all__ = ["api", "server", "start_server"]

settings.register_profile("long", max_examples=2000, deadline=None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server in a process of its own that says all it can in its log."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, "--log-level", "debug", "--log-format", "json") as server:
        yield server
