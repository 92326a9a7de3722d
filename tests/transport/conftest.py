"""The scripted server as a fixture, and settings that wait milliseconds instead of minutes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.transport.config import ClientConfig
from tinsmith.transport.retry import RetryPolicy


def load_helper(name: str, path: Path) -> Any:
    """A helper module beside the tests, loaded once under a name of its own."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


scripted = load_helper("scripted_server", Path(__file__).with_name("scripted_server.py"))

QUICK = RetryPolicy(
    initial_delay_seconds=0.001, max_delay_seconds=0.005, give_up_after_seconds=5.0, max_retries=4
)


@pytest.fixture
def server() -> Iterator[Any]:
    running = scripted.ScriptedServer()
    yield running
    running.close()


@pytest.fixture
def config(server: Any) -> ClientConfig:
    return ClientConfig(base_url=server.url, api_key="tml-test", retry=QUICK, telemetry=False)
