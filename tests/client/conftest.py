"""The service in memory, and clients that wait milliseconds instead of minutes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client import sampling_calls
from tests.support.tinker_stub import TinkerStub
from tinsmith.client.rest import RestClient
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.retry import RetryPolicy

QUICK = RetryPolicy(
    initial_delay_seconds=0.001, max_delay_seconds=0.005, give_up_after_seconds=5.0, max_retries=4
)


def rest_client(service: ServiceClient) -> RestClient:
    """On the uplink of a service client, which closes it."""
    with pytest.warns(FutureWarning):
        return service.create_rest_client()


@pytest.fixture
def stub() -> Iterator[Any]:
    running = TinkerStub()
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


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="m", retry_config=sampling_calls.QUICK)
