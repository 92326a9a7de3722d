"""What holds requests back before they are sent: counts, bytes, back-pressure, billing.

All of it runs on the I/O loop and is shared by every client of one uplink.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from tinsmith.errors import APIStatusError

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = 1.0
LARGE_BACKOFF_SECONDS = 5.0
LARGE_REQUEST_BYTES = 128 * 1024
RECENT_SECONDS = 10.0
"""How long after a back-off dispatch stays throttled."""
THROTTLED_BYTES_FACTOR = 20
THROTTLED_REQUESTS = 10
"""How many requests are in flight meanwhile, each of which counts for so many more bytes."""


class ByteBudget:
    """Limits the bytes in flight. A request is let in while the balance is not negative, so one
    that is larger than the whole budget still goes, alone."""

    def __init__(self, max_bytes: int) -> None:
        self._balance = max_bytes
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        await self._admit()
        self._balance -= num_bytes
        try:
            yield
        finally:
            self._balance += num_bytes
            self._wake()

    async def _admit(self) -> None:
        while self._balance < 0:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                # We may have been let in just before: wake the next.
                if place.done() and not place.cancelled():
                    self._wake()
                raise
            finally:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)

    def _wake(self) -> None:
        if self._balance >= 0:
            for place in self._waiting:
                if not place.done():
                    place.set_result(None)


class SampleGate:
    """Limits sampling requests: their number and bytes in flight. None leaves while the server
    wants a pause, and few do for a while after one."""

    def __init__(
        self, max_bytes: int, *, max_requests: int = 400, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes = ByteBudget(max_bytes)
        self._count = asyncio.Semaphore(max_requests)
        self._few = asyncio.Semaphore(THROTTLED_REQUESTS)
        self.closed_until: float | None = None
        self._now = now

    @contextlib.asynccontextmanager
    async def admit(self, num_bytes: int) -> AsyncIterator[None]:
        async with self._count:
            if self.is_throttled:
                async with self._few, self._bytes.hold(num_bytes * THROTTLED_BYTES_FACTOR):
                    yield
            else:
                async with self._bytes.hold(num_bytes):
                    yield

    async def wait_until_open(self) -> None:
        # The pause may grow while we wait for its end.
        while (left := (self.closed_until or 0.0) - self._now()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)

    def back_off(self, num_bytes: int, server_delay_seconds: float | None = None) -> None:
        """Nobody sends until the pause is over: the server's, or our own guess by size."""
        pause = server_delay_seconds
        if pause is None:
            pause = BACKOFF_SECONDS if num_bytes <= LARGE_REQUEST_BYTES else LARGE_BACKOFF_SECONDS
        self.closed_until = max(self.closed_until or 0.0, self._now() + pause)

    def for_size(self, num_bytes: int) -> SizedGate:
        """This gate, as requests of that size see it."""
        return SizedGate(self, num_bytes)

    @property
    def is_throttled(self) -> bool:
        return self.closed_until is not None and self._now() - self.closed_until < RECENT_SECONDS


class SizedGate:
    """A sample gate that knows how large the request is: a large one backs off for longer."""

    def __init__(self, gate: SampleGate, num_bytes: int) -> None:
        self.wait_until_open = gate.wait_until_open
        self._gate = gate
        self._num_bytes = num_bytes

    def back_off(self, seconds: float | None) -> None:
        self._gate.back_off(self._num_bytes, seconds)


class BillingPause:
    """A 402 pauses the client instead of failing it, for a while: a bill can be paid meanwhile."""

    _FORGET_AFTER_SECONDS = 300.0
    _LOG_EVERY_SECONDS = 60.0

    def __init__(
        self, max_seconds: float = 3600.0, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_seconds = max_seconds
        self._now = now
        self._first: float | None = None
        self._last = 0.0
        self._last_logged: float | None = None

    def left_seconds(self, error: Exception) -> float:
        """How much longer a 402 may pause us; 0 for any other error."""
        if not isinstance(error, APIStatusError) or error.status_code != 402:
            return 0.0
        now = self._now()
        if self._first is None or now - self._last > self._FORGET_AFTER_SECONDS:
            self._first, self._last_logged = now, None
        self._last = now
        left = self._first + self.max_seconds - now
        if left > 0 and (
            self._last_logged is None or now - self._last_logged > self._LOG_EVERY_SECONDS
        ):
            self._last_logged = now
            logger.warning("Paused because of the account's billing status: %s", error.message)
        elif left <= 0:
            logger.error("The billing pause lasted %.0f s; giving up.", now - self._first)
        return max(left, 0.0)
