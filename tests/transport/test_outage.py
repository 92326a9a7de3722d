"""A service that does not answer is named, once, while the client keeps trying."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from tinsmith.client.service import ServiceClient
from tinsmith.errors import APIConnectionError, TinkerError
from tinsmith.transport.base import Request
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.outage import OutageNotice
from tinsmith.transport.retry import Attempts, Repeater, RetryPolicy

REQUEST = Request(method="POST", url="http://localhost:1/api/v1/client/config")
DOWN = APIConnectionError(REQUEST, "Connection error: refused")


def test_an_outage_is_told_after_two_seconds_once_a_minute_and_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    notice = OutageNotice(now=lambda: now)
    notice.failed(DOWN, 1.9)
    notice.answered()
    assert not caplog.messages
    for _ in range(1000):  # as many requests may wait
        notice.failed(DOWN, 2.5)
    assert len(caplog.messages) == 1
    assert "http://localhost:1" in caplog.messages[0] and "refused" in caplog.messages[0]
    now = 61.0
    notice.failed(DOWN, 61.0)
    assert len(caplog.messages) == 2
    notice.answered()
    notice.answered()
    assert caplog.messages[2:] == ["the service answers again"]


def test_other_failures_are_not_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    OutageNotice().failed(TinkerError("no"), 100.0)
    assert not caplog.messages


class _Clock:
    """Time passes while somebody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.mark.parametrize("is_silent", [False, True])
async def test_what_repeats_in_silence_tells_of_no_outage(
    caplog: pytest.LogCaptureFixture, is_silent: bool
) -> None:
    """As telemetry does: that it does not get through is nothing to the user."""

    async def fail(attempts: Attempts) -> None:
        raise DOWN

    policy = RetryPolicy(initial_delay_seconds=1.0, max_retries=4, is_silent=is_silent)
    with pytest.raises(APIConnectionError):
        await Repeater(clock=_Clock()).run(fail, policy)
    assert len(caplog.messages) == (0 if is_silent else 1)


def test_a_wrong_port_is_named_within_three_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """It took five minutes, in silence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    policy = RetryPolicy(give_up_after_seconds=4.0)
    config = ClientConfig(base_url=url, api_key="tml-x", telemetry=False, retry=policy)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(APIConnectionError):
        ServiceClient(config=config).get_server_capabilities()
    told = [each for each in caplog.records if url in each.getMessage()]
    assert len(told) == 1
    assert time.time() - told[0].created > time.monotonic() - started - 3.0, "not only at the end"
