"""The servers of `tests/server` and `tests/compat`, for those who mean them harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.server.conftest import api, server, start_server
from tests.support.server_process import serving

__all__ = ["api", "server", "start_server"]

settings.register_profile("long", max_examples=2000, deadline=None)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """A server in a process of its own that says all it can in its log."""
    with serving(tmp_path, "--log-level", "debug", "--log-format", "json") as server:
        yield server
