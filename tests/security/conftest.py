"""The servers of `tests/server` and `tests/compat`, for those who mean them harm."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("long", max_examples=2000, deadline=None)


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_TESTS = Path(__file__).parents[1]
_in_process = _load("in_process_server", _TESTS / "server" / "conftest.py")
_processes = _load("server_processes", _TESTS / "compat" / "conftest.py")
start_server = _in_process.start_server
server = _in_process.server
api = _in_process.api
Api = _in_process.Api
TestServer = _in_process.TestServer
StartServer = _in_process.StartServer
ServerProcess = _processes.ServerProcess


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """A server in a process of its own that says all it can in its log."""
    server = ServerProcess(tmp_path / "data", "--log-level", "debug", "--log-format", "json")
    server.start()
    yield server
    server.stop()
