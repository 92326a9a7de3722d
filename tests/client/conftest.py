"""The service in memory, and clients that wait milliseconds instead of minutes for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.client.service import ServiceClient
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


_HERE = Path(__file__).parent
load_helper("scripted_server", _HERE.parent / "transport" / "scripted_server.py")
stubs = load_helper("tinker_stub", _HERE / "tinker_stub.py")

QUICK = RetryPolicy(
    initial_delay_seconds=0.001, max_delay_seconds=0.005, give_up_after_seconds=5.0, max_retries=4
)


@pytest.fixture
def stub() -> Iterator[Any]:
    running = stubs.TinkerStub()
    yield running
    running.close()


@pytest.fixture
def make_service(stub: Any) -> Iterator[Callable[..., ServiceClient]]:
    """Service clients of the stub, closed at the end."""
    made: list[ServiceClient] = []

    def make(**changes: Any) -> ServiceClient:
        settings: dict[str, Any] = {
            "base_url": stub.url,
            "api_key": "tml-test",
            "retry": QUICK,
            "telemetry": False,
        }
        service = ServiceClient(config=ClientConfig(**{**settings, **changes}))
        made.append(service)
        return service

    yield make
    for service in made:
        service.close("success").result(10)


@pytest.fixture
def service(make_service: Callable[..., ServiceClient]) -> ServiceClient:
    return make_service()
