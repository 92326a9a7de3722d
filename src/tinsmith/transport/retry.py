"""When a failed request is sent again, and how long to wait: one function, used by every layer.

What is worth another attempt:

    no answer (connection refused, reset, cut off, timed out)     yes
    x-should-retry: true / false                                  as it says, whatever the status
    408, 409, 429, 5xx                                            yes
    400 without a body (a proxy's doing, not the service's)       a few times, on a new connection
    402                                                           pauses, see `limits.BillingPause`
    everything else                                               no

The waiting time is the server's (`retry-after-ms`, `retry-after`) if it is sane, otherwise it
doubles from attempt to attempt up to a cap, with jitter.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

from tinsmith.errors import APIConnectionError, APIError, APIStatusError
from tinsmith.transport.base import Request, Response, Transport
from tinsmith.transport.limits import BillingPause

logger = logging.getLogger(__name__)

LONGEST_SERVER_DELAY_SECONDS = 60.0
BILLING_DELAY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    initial_delay_seconds: float = 0.5
    """Before the second attempt."""

    max_delay_seconds: float = 10.0
    """The cap of the doubling."""

    jitter: float = 0.25
    """Up to this share of a delay is left out at random, so that clients do not march in step."""

    give_up_after_seconds: float | None = 300.0
    """From the first attempt; None: never."""

    max_retries: int | None = None
    """None: only time limits them. With 0, not even a billing problem is waited for."""

    bare_bad_request_retries: int = 16
    """How often a 400 without a body is taken for a proxy's and tried again."""

    bad_request_retries: int = 0
    """The same for any 400, where proxies are known to add one."""

    immediate_statuses: frozenset[int] = frozenset()
    """Answers that mean "ask again" and cost no delay: the server holds the request instead."""

    excluded_statuses: frozenset[int] = frozenset()
    """Answers that somebody else deals with, such as back-pressure."""


NO_RETRY = RetryPolicy(max_retries=0)
POLLING = RetryPolicy(
    give_up_after_seconds=None,
    max_delay_seconds=30.0,
    bad_request_retries=3,
    immediate_statuses=frozenset({408}),
)
"""For results that the server holds until they are there."""


def is_retryable_status(status: int) -> bool:
    return status in (408, 409, 429) or status >= 500


def is_bare_bad_request(error: BaseException) -> bool:
    """A 400 without a body: services explain themselves, proxies often do not."""
    return (
        isinstance(error, APIStatusError)
        and error.status_code == 400
        and not error.response.content
    )


def decide(
    policy: RetryPolicy,
    error: APIError,
    *,
    attempt: int,
    elapsed_seconds: float,
    billing_pause_left_seconds: float = 0.0,
    chance: float = 0.0,
    now: datetime | None = None,
) -> float | None:
    """Seconds to wait before the next attempt; None: give up and raise `error`.

    `attempt` counts from 0, `elapsed_seconds` from the first attempt. `chance` in [0, 1) draws
    the jitter. `now` is what HTTP dates are compared with.
    """
    if isinstance(error, APIStatusError):
        headers: Mapping[str, str] = error.response.headers
        status = error.status_code
        if status == 402 and billing_pause_left_seconds > 0 and policy.max_retries != 0:
            return BILLING_DELAY_SECONDS
        if status in policy.excluded_statuses:
            return None
        if not _is_worth_another(policy, error, headers, attempt):
            return None
        delay = server_delay_seconds(headers, now=now)
        if delay is None and status in policy.immediate_statuses:
            delay = 0.0
    elif isinstance(error, APIConnectionError):
        delay = None
    else:
        return None
    if policy.max_retries is not None and attempt >= policy.max_retries:
        return None
    if delay is None:
        delay = backoff_seconds(policy, attempt, chance)
    if policy.give_up_after_seconds is None:
        return delay
    left = policy.give_up_after_seconds - elapsed_seconds
    return min(delay, left) if left > 0 else None


def _is_worth_another(
    policy: RetryPolicy, error: APIStatusError, headers: Mapping[str, str], attempt: int
) -> bool:
    forced = headers.get("x-should-retry", "").lower()
    if forced in ("true", "false"):
        return forced == "true"
    if error.status_code == 400:
        bare = is_bare_bad_request(error)
        budget = policy.bare_bad_request_retries if bare else policy.bad_request_retries
        return attempt < budget
    return is_retryable_status(error.status_code)


def backoff_seconds(policy: RetryPolicy, attempt: int, chance: float) -> float:
    # Beyond 2^60 times anything is over the cap, and larger powers overflow a float.
    delay = min(policy.initial_delay_seconds * 2.0 ** min(attempt, 60), policy.max_delay_seconds)
    return delay * (1.0 - policy.jitter * chance)


def server_delay_seconds(
    headers: Mapping[str, str], *, now: datetime | None = None
) -> float | None:
    """How long the server asks to wait, if it does and the time is sane (0 < t <= 60 s)."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * scale
        except ValueError:
            seconds = _seconds_until(text, now or datetime.now(UTC))
        if 0 < seconds <= LONGEST_SERVER_DELAY_SECONDS:
            return seconds
    return None


def _seconds_until(http_date: str, now: datetime) -> float:
    try:
        moment = parsedate_to_datetime(http_date)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - now).total_seconds()


class Clock(Protocol):
    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """Not the time of day, which may jump."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


FailureObserver = Callable[[Request, APIError, int, bool], None]
"""Told about each failed attempt: the request, the error, the attempt, whether another follows."""


class Retrying:
    """A transport around a transport that sends again what is worth it."""

    def __init__(
        self,
        inner: Transport,
        policy: RetryPolicy,
        *,
        billing: BillingPause | None = None,
        clock: Clock | None = None,
        on_failure: FailureObserver | None = None,
    ) -> None:
        self._inner = inner
        self._policy = policy
        self._billing = billing or BillingPause()
        self._clock = clock or MonotonicClock()
        self._on_failure = on_failure

    async def send(self, request: Request) -> Response:
        policy = request.retry or self._policy
        started = self._clock.now()
        attempt = 0
        while True:
            try:
                return await self._inner.send(_numbered(request, attempt))
            except (APIConnectionError, APIStatusError) as error:
                wait = decide(
                    policy,
                    error,
                    attempt=attempt,
                    elapsed_seconds=self._clock.now() - started,
                    billing_pause_left_seconds=self._billing.left_seconds(error),
                    chance=random.random(),
                )
                if self._on_failure is not None:
                    self._on_failure(request, error, attempt, wait is not None)
                if wait is None:
                    raise
                logger.debug("%r failed (%s); again in %.2f s", request, error, wait)
            await self._clock.sleep(wait)
            attempt += 1


def _numbered(request: Request, attempt: int) -> Request:
    if attempt == 0:
        return request
    return replace(request, headers={**request.headers, "X-Stainless-Retry-Count": str(attempt)})
