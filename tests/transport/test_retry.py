"""The retry policy: one function decides, and each failure costs the number of requests it says."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from tests.support.scripted_server import Answer, Recorded
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    TinkerError,
)
from tinsmith.transport.base import Request, Response
from tinsmith.transport.config import ClientConfig
from tinsmith.transport.http import Http
from tinsmith.transport.limits import BillingPause
from tinsmith.transport.retry import (
    NO_RETRY,
    POLLING,
    Repeater,
    Retrying,
    RetryPolicy,
    backoff_seconds,
    decide,
    server_delay_seconds,
)
from tinsmith.wire.endpoints import ConnectionClass

REQUEST = Request(method="POST", url="http://x/y")
POLICY = RetryPolicy()


def status_error(
    status: int, *, headers: dict[str, str] | None = None, body: bytes = b"{}"
) -> APIStatusError:
    response = Response(status_code=status, headers=headers or {}, content=body, request=REQUEST)
    return APIStatusError("no", response, None)


def waits(error: APIError, policy: RetryPolicy = POLICY, **options: Any) -> float | None:
    options = {"attempt": 0, "elapsed_seconds": 0.0, **options}
    return decide(policy, error, **options)


@pytest.mark.parametrize("forced", [None, "true", "false", "True", "nonsense"])
def test_what_is_repeated_is_a_function_of_status_and_header(forced: str | None) -> None:
    """S50, S53, S56: every status with every value of x-should-retry."""
    headers = {} if forced is None else {"x-should-retry": forced}
    for status in range(400, 600):
        by_status = status in (408, 409, 429) or status >= 500
        expected = {"true": True, "True": True, "false": False}.get(forced or "", by_status)
        assert (waits(status_error(status, headers=headers)) is not None) == expected, status


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (APIConnectionError(REQUEST), True),
        (APITimeoutError(REQUEST), True),
        (status_error(400, body=b""), True),
        (status_error(400), False),
        (
            APIResponseValidationError(
                Response(status_code=200, headers={}, content=b"", request=REQUEST), None
            ),
            False,
        ),
    ],
)
def test_no_answer_is_repeated_and_a_wrong_one_is_not(error: APIError, expected: bool) -> None:
    """S50: exceptions without a status."""
    assert (waits(error) is not None) == expected


NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "0.5"}, 0.0005),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": format_datetime(NOW + timedelta(seconds=7), usegmt=True)}, 7.0),
        ({"retry-after": format_datetime(NOW - timedelta(seconds=7), usegmt=True)}, None),
        ({"retry-after": "60"}, 60.0),
        ({"retry-after": "60.1"}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "x", "retry-after": "3"}, 3.0),
        ({}, None),
    ],
)
def test_the_servers_delay_is_used_when_it_is_sane(
    headers: dict[str, str], expected: float | None
) -> None:
    """S54: milliseconds, seconds, fractions and dates, between 0 and 60 s."""
    assert server_delay_seconds(headers, now=NOW) == expected
    if expected is not None:
        assert waits(status_error(503, headers=headers), now=NOW) == expected


def test_delays_grow_to_a_cap_and_never_overflow() -> None:
    """S55: attempts 0 to 2000 stay within [0, cap]."""
    for attempt in range(2001):
        for chance in (0.0, 0.5, 0.999):
            delay = backoff_seconds(POLICY, attempt, chance)
            assert 0 <= delay <= POLICY.max_delay_seconds and math.isfinite(delay)
    assert [backoff_seconds(POLICY, n, 0.0) for n in range(6)] == [0.5, 1, 2, 4, 8, 10]


def test_it_gives_up_after_its_time_and_not_before() -> None:
    error = status_error(500)
    assert waits(error, elapsed_seconds=299.9) == pytest.approx(0.1)
    assert waits(error, elapsed_seconds=300.0) is None
    assert waits(error, POLLING, elapsed_seconds=1e9) is not None


def test_polling_asks_again_at_once_when_the_server_says_not_yet() -> None:
    """S46: a 408 means not yet; a 400 is forgiven three times; 403 is final."""
    assert waits(status_error(408), POLLING) == 0.0
    assert [waits(status_error(400), POLLING, attempt=n) is None for n in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert waits(status_error(403), POLLING) is None


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class Failing:
    """A transport that fails as told and counts."""

    def __init__(self, *errors: APIError) -> None:
        self.errors = list(errors)
        self.sent: list[Request] = []

    async def send(self, request: Request) -> Response:
        self.sent.append(request)
        if self.errors:
            raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        return Response(status_code=200, headers={}, content=b"", request=request)


async def test_a_persistent_failure_is_given_up_after_five_minutes() -> None:
    clock, inner = FakeClock(), Failing(status_error(503))
    with pytest.raises(APIStatusError):
        await Retrying(inner, POLICY, Repeater(clock=clock)).send(REQUEST)
    # The last pause, too, has a least length.
    assert clock.time == pytest.approx(300.0, abs=POLICY.initial_delay_seconds)
    assert 30 < len(inner.sent) < 50


async def test_a_402_pauses_for_as_long_as_the_service_allows() -> None:
    clock = FakeClock()
    billing = BillingPause(max_seconds=3600, now=clock.now)
    inner = Failing(status_error(402))
    with pytest.raises(APIStatusError):
        await Retrying(inner, POLICY, Repeater(clock=clock, billing=billing)).send(REQUEST)
    assert set(clock.slept) == {5.0}
    assert clock.time == pytest.approx(3600.0)


async def test_an_old_402_does_not_shorten_the_pause_of_a_new_one() -> None:
    clock = FakeClock()
    billing = BillingPause(max_seconds=100, now=clock.now)
    assert billing.left_seconds(status_error(402)) == 100
    clock.time = 1000.0
    assert billing.left_seconds(status_error(402)) == 100


# Over a real socket: what the server does, and how many requests it must see.

OK = Answer(200, {"ok": True})
CASES = [
    ([OK], 1, None),
    ([Answer(500), OK], 2, None),
    ([Answer(408), Answer(409), Answer(429), Answer(502), OK], 5, None),
    ([Answer(503)], 5, APIStatusError),
    ([Answer(409)], 5, APIStatusError),
    ([Answer(429, headers={"retry-after-ms": "1"}), OK], 2, None),
    ([Answer(400, {"detail": "no"})], 1, APIStatusError),
    ([Answer(400, b""), OK], 2, None),
    ([Answer(400, b"")], 5, APIStatusError),
    ([Answer(401)], 1, APIStatusError),
    ([Answer(403)], 1, APIStatusError),
    ([Answer(404)], 1, APIStatusError),
    ([Answer(422)], 1, APIStatusError),
    ([Answer(410)], 1, APIStatusError),
    ([Answer(400, headers={"x-should-retry": "true"}), OK], 2, None),
    ([Answer(503, headers={"x-should-retry": "false"})], 1, APIStatusError),
    ([Answer(fault="reset"), OK], 2, None),
    ([Answer(fault="reset")], 5, APIConnectionError),
    ([Answer(fault="truncate"), OK], 2, None),
    ([Answer(fault="garbage"), OK], 2, None),
    ([Answer(fault="stall"), OK], 2, None),
    ([Answer(fault="stall")], 5, APITimeoutError),
    ([Answer(200, {"ok": True}, fault="reset_body"), OK], 2, None),
    ([Answer(200, {"ok": True}, fault="reset_body")], 5, APIConnectionError),
    ([Answer(200, {"ok": True}, fault="stall_body"), OK], 2, None),
    ([Answer(200, {"ok": True}, fault="stall_body")], 5, APITimeoutError),
    ([Answer(200, {"ok": True}, fault="slow_body")], 1, None),
]


@pytest.mark.parametrize(("script", "expected_requests", "error"), CASES)
async def test_each_failure_costs_the_documented_number_of_requests(
    server: Any,
    config: ClientConfig,
    script: list[Any],
    expected_requests: int,
    error: type[Exception] | None,
) -> None:
    """S51, S69: statuses, resets, cut-off and garbled answers, stalls."""
    server.on("/try", *script)
    http = Http(config)
    transport = Retrying(http, config.retry, Repeater())
    request = Request(method="POST", url=f"{server.url}/try", content=b"{}", timeout_seconds=0.15)
    try:
        if error is None:
            assert (await transport.send(request)).json() == {"ok": True}
        else:
            with pytest.raises(error):
                await transport.send(request)
    finally:
        await http.close()
    assert server.count("/try") == expected_requests
    retry_counts = [r.headers.get("x-stainless-retry-count", "0") for r in server.seen("/try")]
    assert retry_counts == [str(n) for n in range(expected_requests)]


async def test_a_402_reaches_the_caller_when_the_pause_is_over(
    server: Any, config: ClientConfig
) -> None:
    server.on("/try", Answer(402, {"detail": "no credit"}))
    http = Http(config)
    transport = Retrying(http, config.retry, Repeater(billing=BillingPause(max_seconds=0)))
    with pytest.raises(BillingError, match="no credit"):
        await transport.send(Request(method="POST", url=f"{server.url}/try"))
    await http.close()
    assert server.count("/try") == 1


async def test_a_proxys_bare_400_is_tried_on_a_new_connection(
    server: Any, config: ClientConfig
) -> None:
    """A connection is kept a moment after its answer: until one is used again, there is no 400."""
    used: list[int] = []

    def refuse_used(request: Recorded) -> Answer:
        is_used = request.connection in used
        used.append(request.connection)
        return Answer(400, b"") if is_used else OK

    server.on("/try", refuse_used)
    http = Http(config)
    transport = Retrying(http, config.retry, Repeater())
    while len(used) == len(set(used)):
        await transport.send(Request(method="POST", url=f"{server.url}/try", content=b"{}"))
    await http.close()
    *before, refused, again = used
    assert refused in before and again not in before


async def test_a_server_that_accepts_late_is_waited_for(server: Any, config: ClientConfig) -> None:
    server.on("/try", Answer(200, {"ok": 1}, delay=0.2))
    http = Http(config)
    answer = await http.send(Request(method="GET", url=f"{server.url}/try", timeout_seconds=5.0))
    await http.close()
    assert answer.json() == {"ok": 1}


async def test_a_connection_that_is_accepted_late_is_waited_for(config: ClientConfig) -> None:
    """The kernel makes the connection, and nobody reads from it for a while: one request."""
    arrived: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            time.sleep(0.3)
            peer, _ = listening.accept()
            with peer:
                arrived.append(peer.recv(65536))
                peer.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"ok": 1}')

        accepting = asyncio.create_task(asyncio.to_thread(serve))
        http = Http(config)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/x"
        answer = await Retrying(http, config.retry, Repeater()).send(Request(method="GET", url=url))
        await accepting
        await http.close()
    assert answer.json() == {"ok": 1}
    assert len(arrived) == 1


async def test_a_request_that_may_not_be_repeated_is_sent_once(
    server: Any, config: ClientConfig
) -> None:
    server.on("/try", Answer(503))
    http = Http(config)
    transport = Retrying(http, config.retry, Repeater())
    with pytest.raises(APIStatusError):
        await transport.send(Request(method="POST", url=f"{server.url}/try", retry=NO_RETRY))
    await http.close()
    assert server.count("/try") == 1


async def test_a_closed_transport_says_so(server: Any, config: ClientConfig) -> None:
    """S75: a clear error of our own, not the library's."""
    http = Http(config)
    await http.close()
    with pytest.raises(TinkerError, match="closed"):
        await http.send(Request(method="GET", url=server.url, connection=ConnectionClass.TRAIN))


async def test_cancelling_a_request_closes_its_connection(
    server: Any, config: ClientConfig
) -> None:
    server.on("/try", Answer(fault="stall"))
    http = Http(config)
    sending = asyncio.create_task(http.send(Request(method="GET", url=f"{server.url}/try")))
    while not server.count("/try"):  # noqa: ASYNC110  # the server runs in another thread
        await asyncio.sleep(0.01)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await http.close()


async def test_what_repeats_in_silence_waits_for_no_bill() -> None:
    """It would be sent for an hour, and the user's own pause would count from then."""
    clock = FakeClock()
    billing = BillingPause(max_seconds=3600, now=clock.now)
    inner = Failing(status_error(402))
    with pytest.raises(APIStatusError):
        policy = RetryPolicy(max_retries=4, is_silent=True)
        await Retrying(inner, policy, Repeater(clock=clock, billing=billing)).send(REQUEST)
    assert len(inner.sent) == 1
    clock.time += 1000.0
    assert billing.left_seconds(status_error(402)) == 3600
