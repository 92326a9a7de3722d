"""Many samples at once: a limit, another attempt after a lost promise, and an error at a
standstill.

A sample is pure, so one whose promise the service has lost is made again. The transport retries
single requests; each kind of error is retried by one layer only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tinsmith.errors import APIConnectionError, APIStatusError, RetryableException
from tinsmith.transport.base import Request
from tinsmith.transport.retry import Repeater, RetryPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOG_EVERY_SECONDS = 2.0


@dataclass(frozen=True)
class RetryConfig:
    """How a sampling client deals with failure. The service decides about `max_connections`."""

    max_connections: int | None = 1000
    """Most samples in flight; None: no limit."""

    progress_timeout: float = 120 * 60
    """Seconds without a single finished sample after which all of them fail as stuck."""

    retry_delay_base: float = 0.5
    """Seconds before the second attempt."""

    retry_delay_max: float = 10.0
    """The delay doubles from attempt to attempt up to this."""

    jitter_factor: float = 0.25
    """Random share by which delays differ."""

    enable_retry_logic: bool = True
    """Whether anything is attempted again for longer than a few minutes."""

    enable_stuck_detection: bool = True
    """Whether `progress_timeout` applies."""

    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        RetryableException,
    )
    """Errors after which a sample is asked for again. Statuses such as 503 are retried without
    being listed."""

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise ValueError(f"max_connections must be positive, got {self.max_connections}")

    def policy(self) -> RetryPolicy:
        """For a single request, which is sent again under the same id."""
        return RetryPolicy(
            initial_delay_seconds=self.retry_delay_base,
            max_delay_seconds=self.retry_delay_max,
            jitter=self.jitter_factor,
            give_up_after_seconds=None if self.enable_retry_logic else 300.0,
        )

    def again_policy(self) -> RetryPolicy:
        """For a whole sample, which is made anew. What the service answered to a single request
        was decided by `policy`."""
        return replace(
            self.policy(),
            max_retries=None if self.enable_retry_logic else 0,
            errors=tuple(
                each for each in self.retryable_exceptions if not issubclass(each, APIStatusError)
            ),
        )


class SampleRetries:
    """Shared by the clients of one sampling session that have the same config."""

    def __init__(
        self, config: RetryConfig, name: str = "sampling", repeater: Repeater | None = None
    ) -> None:
        self.config = config
        self.name = name
        self.submit_policy = config.policy()
        self._again_policy = config.again_policy()
        self._repeater = repeater or Repeater()
        self._room = (
            asyncio.Semaphore(config.max_connections)
            if config.max_connections is not None
            else contextlib.nullcontext()
        )
        self._waiting = self._finished = self._retries = 0
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._stuck: set[asyncio.Task[Any]] = set()
        self._last_progress = time.monotonic()
        self._last_log = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    async def execute(self, sample: Callable[[], Awaitable[T]]) -> T:
        self._waiting += 1
        try:
            await self._room.__aenter__()
        finally:
            self._waiting -= 1
        task = asyncio.current_task()
        assert task is not None, "runs inside a task"
        self._enter(task)
        try:
            return await self._repeater.run(
                lambda _: self._once(sample), self._again_policy, self._count
            )
        except asyncio.CancelledError:
            if task not in self._stuck:
                raise
            task.uncancel()
            raise APIConnectionError(
                Request(method="POST", url=self.name),
                f"No progress made in {self.config.progress_timeout} s. Requests appear to be "
                f"stuck: {len(self._in_flight)} samples in flight, {self._finished} finished.",
            ) from None
        finally:
            self._leave(task)
            await self._room.__aexit__(None, None, None)

    async def _once(self, sample: Callable[[], Awaitable[T]]) -> T:
        result = await sample()
        self._finished += 1
        self._last_progress = time.monotonic()
        return result

    def _count(self, error: Exception, attempt: int, will_retry: bool) -> None:
        if will_retry:
            self._retries += 1
            logger.debug("[%s] %s; sampling again", self.name, error)

    def _enter(self, task: asyncio.Task[Any]) -> None:
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._in_flight.add(task)
        if self.config.enable_stuck_detection and self._watchdog is None:
            self._watch()
        self._log()

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._in_flight.discard(task)
        self._stuck.discard(task)
        if not self._in_flight and self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self._log()

    def _watch(self) -> None:
        """One timer for all samples in flight, set for when they would be stuck."""
        self._watchdog = None
        left = self._last_progress + self.config.progress_timeout - time.monotonic()
        if left <= 0:
            self._stuck |= self._in_flight
            for task in tuple(self._in_flight):
                task.cancel()
        elif self._in_flight:
            self._watchdog = asyncio.get_running_loop().call_later(left, self._watch)

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._last_log > LOG_EVERY_SECONDS:
            self._last_log = now
            logger.debug(
                "[%s] %d waiting, %d in flight, %d done, %d retries",
                self.name,
                self._waiting,
                len(self._in_flight),
                self._finished,
                self._retries,
            )


def shared_retries(
    holder: Hashable, name: str, config: RetryConfig, repeater: Repeater
) -> SampleRetries:
    """One per holder, sampling session and config, for as long as a client uses it."""
    with _RETRIES_LOCK:
        known = _RETRIES.setdefault(holder, weakref.WeakValueDictionary())
        retries = known.get((name, config))
        if retries is None:
            retries = known[(name, config)] = SampleRetries(config, name, repeater)
        return retries


_RETRIES_LOCK = threading.Lock()
_RETRIES: weakref.WeakKeyDictionary[
    Hashable, weakref.WeakValueDictionary[tuple[str, RetryConfig], SampleRetries]
] = weakref.WeakKeyDictionary()
