"""When a failed attempt is repeated: `decide` says whether and when, `Repeater` does it.

Every path uses both: requests, results, the poller, sampling, streams, downloads. A path states
its limits as a `RetryPolicy`. What is worth another attempt:

    x-should-retry: true / false                                  as it says, whatever the status
    no answer (connection refused, reset, cut off, timed out)     yes
    408, 409, 429, 5xx                                            yes
    400 without a body (a proxy's doing, not the service's)       a few times, on a new socket
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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeVar

from tinsmith.errors import APIConnectionError, APIError, APIStatusError, RateLimitError
from tinsmith.transport.base import Request, Response, Transport
from tinsmith.transport.limits import BillingPause
from tinsmith.transport.outage import OutageNotice

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_SERVER_DELAY_SECONDS = 60.0
BILLING_DELAY_SECONDS = 5.0
SHORTEST_SHARE = 0.1
"""No wait is shorter than this share of the policy's first delay, whatever a server asks for."""


class Gate(Protocol):
    """Holds back requests of one kind while the service asks for a pause."""

    async def wait_until_open(self) -> None: ...

    def back_off(self, seconds: float | None) -> None:
        """The service asked for a pause, of this length if it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    initial_delay_seconds: float = 0.5
    """Before the second attempt."""

    max_delay_seconds: float = 10.0
    """The delay doubles from attempt to attempt up to this."""

    jitter: float = 0.25
    """Up to this share of a delay is left out at random, so that clients do not march in step."""

    give_up_after_seconds: float | None = 300.0
    """From the first attempt; None: never."""

    max_retries: int | None = None
    """None: only time limits them. 0: the caller decides, even about a billing problem."""

    bare_bad_request_retries: int = 16
    """How often a 400 without a body is taken for a proxy's and tried again."""

    bad_request_retries: int = 0
    """The same for any 400, where proxies are known to add one."""

    immediate_statuses: frozenset[int] = frozenset()
    """Answers that mean "ask again" and cost no delay: the server holds the request instead."""

    is_silent: bool = False
    """Whether the user is not told when attempts go unanswered, and nobody waits for a bill."""

    gate: Gate | None = None
    """Every attempt waits for it, and a 429 closes it for all who share it."""

    errors: tuple[type[Exception], ...] = (APIConnectionError, APIStatusError)
    """Errors that this policy decides about. Any other was decided by another layer and is
    raised."""


NO_RETRY = RetryPolicy(max_retries=0)
POLLING = RetryPolicy(
    give_up_after_seconds=None,
    max_delay_seconds=30.0,
    bad_request_retries=3,
    immediate_statuses=frozenset({408}),
)
"""For results that the server holds until they are there."""


def is_bare_bad_request(error: BaseException) -> bool:
    """A 400 without a body: services explain themselves, proxies often do not."""
    return (
        isinstance(error, APIStatusError)
        and error.status_code == 400
        and not error.response.content
    )


def decide(
    policy: RetryPolicy,
    error: Exception,
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
    if policy.max_retries == 0 or not isinstance(error, policy.errors):
        return None
    delay = None
    if isinstance(error, APIStatusError):
        forced = error.response.headers.get("x-should-retry", "").lower()
        if forced == "false":
            return None
        if error.status_code == 402 and billing_pause_left_seconds > 0:
            return BILLING_DELAY_SECONDS
        if forced != "true" and not _is_worth_another(policy, error, attempt):
            return None
        delay = _stated_delay_seconds(policy, error, now)
    if policy.max_retries is not None and attempt >= policy.max_retries:
        return None
    if delay is None:
        delay = backoff_seconds(policy, attempt, chance)
    if policy.give_up_after_seconds is None:
        return delay
    left = policy.give_up_after_seconds - elapsed_seconds
    return min(delay, left) if left > 0 else None


def _is_worth_another(policy: RetryPolicy, error: APIStatusError, attempt: int) -> bool:
    if error.status_code == 400:
        bare = is_bare_bad_request(error)
        return attempt < (policy.bare_bad_request_retries if bare else policy.bad_request_retries)
    return error.status_code in (408, 409, 429) or error.status_code >= 500


def _stated_delay_seconds(
    policy: RetryPolicy, error: APIStatusError, now: datetime | None
) -> float | None:
    """The wait that the answer itself asks for, if it does."""
    delay = server_delay_seconds(error.response.headers, now=now)
    if delay is None and error.status_code in policy.immediate_statuses:
        return 0.0
    if policy.gate is not None and error.status_code == 429:
        return 0.0  # the gate waits
    return delay


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
    """Never jumps, unlike the time of day."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Attempts:
    """How often one thing was tried, and since when."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.start_over()

    def start_over(self) -> None:
        """Progress was made: limits count from here."""
        self.number = 0
        self._started = self._now()

    @property
    def elapsed_seconds(self) -> float:
        return self._now() - self._started


FailedAttempt = Callable[[Exception, int, bool], None]
"""Told about each failed attempt: the error, its number from 0, and whether another follows."""


class Repeater:
    """Makes attempts until one works or `decide` gives up."""

    def __init__(self, *, billing: BillingPause | None = None, clock: Clock | None = None) -> None:
        self.billing = billing or BillingPause()
        self._notice = OutageNotice()
        self._clock = clock or MonotonicClock()

    async def run(
        self,
        attempt: Callable[[Attempts], Awaitable[T]],
        policy: RetryPolicy,
        on_failure: FailedAttempt | None = None,
    ) -> T:
        attempts = Attempts(self._clock.now)
        while True:
            if policy.gate is not None:
                await policy.gate.wait_until_open()
            try:
                result = await attempt(attempts)
            except Exception as error:  # what is not the policy's business is raised again
                wait = self._wait_after(error, policy, attempts)
                if on_failure is not None:
                    on_failure(error, attempts.number, wait is not None)
                if wait is None:
                    raise
                if not policy.is_silent:
                    self._notice.failed(error, attempts.elapsed_seconds + wait)
                logger.debug("failed (%s); again in %.2f s", error, wait)
            else:
                self._notice.answered()
                return result
            await self._clock.sleep(max(wait, policy.initial_delay_seconds * SHORTEST_SHARE))
            attempts.number += 1

    def _wait_after(
        self, error: Exception, policy: RetryPolicy, attempts: Attempts
    ) -> float | None:
        if isinstance(error, RateLimitError) and policy.gate is not None:
            policy.gate.back_off(server_delay_seconds(error.response.headers))
        return decide(
            policy,
            error,
            attempt=attempts.number,
            elapsed_seconds=attempts.elapsed_seconds,
            billing_pause_left_seconds=0.0
            if policy.is_silent
            else self.billing.left_seconds(error),
            chance=random.random(),
        )


FailureObserver = Callable[[Request, APIError, int, bool], None]
"""As `FailedAttempt`, with the request that failed."""


class Retrying:
    """A transport around a transport that sends again what is worth it."""

    def __init__(
        self,
        inner: Transport,
        policy: RetryPolicy,
        repeater: Repeater,
        on_failure: FailureObserver | None = None,
    ) -> None:
        self._inner = inner
        self._policy = policy
        self._repeater = repeater
        self._on_failure = on_failure

    async def send(self, request: Request) -> Response:
        def report(error: Exception, attempt: int, will_retry: bool) -> None:
            if self._on_failure is not None and isinstance(error, APIError):
                self._on_failure(request, error, attempt, will_retry)

        return await self._repeater.run(
            lambda attempts: self._inner.send(_numbered(request, attempts.number)),
            request.retry or self._policy,
            report,
        )


def _numbered(request: Request, attempt: int) -> Request:
    if attempt == 0:
        return request
    return replace(request, headers={**request.headers, "X-Stainless-Retry-Count": str(attempt)})
