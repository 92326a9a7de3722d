"""The scripted server as a fixture, and settings that wait milliseconds instead of minutes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.scripted_server import ScriptedServer
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.retry import RetryPolicy

QUICK = RetryPolicy(
    initial_delay_seconds=0.001, max_delay_seconds=0.005, give_up_after_seconds=5.0, max_retries=4
)


@pytest.fixture
def server() -> Iterator[Any]:
    running = ScriptedServer()
    yield running
    running.close()


@pytest.fixture
def config(server: Any) -> ClientConfig:
    return ClientConfig(base_url=server.url, api_key="tml-test", retry=QUICK, telemetry=False)
