"""The server of `tests/server`, for those who mean it harm."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from hypothesis import settings

settings.register_profile("long", max_examples=2000, deadline=None)


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("in_process_server", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_in_process = _load(Path(__file__).parents[1] / "server" / "conftest.py")
start_server = _in_process.start_server
server = _in_process.server
api = _in_process.api
Api = _in_process.Api
TestServer = _in_process.TestServer
StartServer = _in_process.StartServer
