"""What the client reports to the service about itself; it never slows or fails a user's call.

Events wait in a bounded queue and leave in batches, in the background. A batch that cannot be
delivered is tried a few times and dropped. `TINKER_TELEMETRY=0` switches all of it off; local logs
and `stats` do not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tinsmith.client.uplink.api import Api
from tinsmith.client.uplink.tags import current_tags
from tinsmith.client.uplink.user_errors import find_user_error
from tinsmith.errors import APIError
from tinsmith.transport.base import Request
from tinsmith.transport.config import PROTOCOL_VERSION
from tinsmith.transport.retry import RetryPolicy
from tinsmith.types import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)
from tinsmith.wire import endpoints
from tinsmith.wire.endpoints import ConnectionClass

logger = logging.getLogger(__name__)

MAX_BATCH_EVENTS = 100
MAX_QUEUED_EVENTS = 10_000
FLUSH_SECONDS = 10.0
SEND_TIMEOUT_SECONDS = 5.0
SENDING = RetryPolicy(initial_delay_seconds=1.0, max_retries=4, is_silent=True)


class Telemetry:
    """One per uplink. The `log` methods may be called from any thread."""

    def __init__(
        self,
        api: Api,
        session_id: str | None,
        loop: asyncio.AbstractEventLoop,
        *,
        close_seconds: float,
    ) -> None:
        """Without a session id, events go under an id of their own and no session is announced."""
        self._api = api
        self._loop = loop
        self._close_seconds = close_seconds
        self._session_id = session_id or f"sessionless-{uuid.uuid4()}"
        self._has_session = session_id is not None
        self._started = datetime.now(UTC)
        self._lock = threading.Lock()
        self._index = 0
        self._queue: deque[TelemetryEvent] = deque()
        self._wake = asyncio.Event()
        self._flush_all = False
        """Whether a batch that is not full may leave."""
        self._idle = asyncio.Event()
        if self._has_session:
            self._add(SessionStartEvent(event="SESSION_START", **self._common("INFO")))

    def log(
        self,
        event_name: str,
        event_data: Mapping[str, Any] | None = None,
        severity: Severity = "INFO",
    ) -> bool:
        """Queue an event; False if the queue is full and it was dropped."""
        data = _jsonable(event_data or {})
        if tags := current_tags():
            data["tags"] = dict(tags)
        return self._add(
            GenericEvent(
                event="GENERIC_EVENT",
                event_name=event_name,
                event_data=data,
                **self._common(severity),
            )
        )

    def log_exception(self, error: BaseException, severity: Severity = "ERROR") -> bool:
        """Queue an error, marked as the user's fault where it is, and send it soon."""
        user_error = find_user_error(error)
        if user_error is not None:
            data: dict[str, Any] = {"error_type": type(error).__name__, "message": str(error)}
            for name in ("status_code", "body"):
                if (value := getattr(user_error, name, None)) is not None:
                    data[name] = value
            logged = self.log("user_error", data, "WARNING")
        else:
            logged = self._add(
                UnhandledExceptionEvent(
                    event="UNHANDLED_EXCEPTION",
                    error_type=type(error).__name__,
                    error_message=str(error),
                    traceback="".join(traceback.format_exception(error)),
                    **self._common(severity),
                )
            )
        self._flush_all = True
        self._loop.call_soon_threadsafe(self._wake.set)
        return logged

    def note_failure(
        self, request: Request, error: APIError, attempt: int, will_retry: bool
    ) -> None:
        """Count a failed attempt; the transport calls this."""
        kind, status = request.connection, getattr(error, "status_code", None)
        if kind is ConnectionClass.TELEMETRY or status == 402:
            return
        if kind is ConnectionClass.RETRIEVE:
            if status == 408:
                return  # not a failure: the result is not there yet
            ending = "connection_error" if status is None else "api_status_error"
            name = f"APIFuture.result_async.{ending}"
        else:
            name = "InternalClientHolder.execute_with_retries.exception"
        self.log(
            name,
            {
                "path": request.url,
                "exception": str(error),
                "exception_type": type(error).__name__,
                "status_code": status,
                "is_retryable": will_retry,
                "is_user_error": find_user_error(error) is not None,
                "attempt_count": attempt,
            },
            severity="WARNING" if will_retry else "ERROR",
        )

    async def run(self) -> None:
        """The background task."""
        while True:
            try:
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                self._flush_all = True
            self._wake.clear()
            self._idle.clear()
            while len(self._queue) >= (1 if self._flush_all else MAX_BATCH_EVENTS):
                await self._deliver(self._take())
            self._flush_all = False
            self._idle.set()

    async def close(self) -> None:
        """Announce the end and give what is queued a short time to leave."""
        if self._has_session:
            lasted = str(datetime.now(UTC) - self._started)
            end = SessionEndEvent(event="SESSION_END", duration=lasted, **self._common("INFO"))
            self._add(end)
        self._idle.clear()
        self._flush_all = True
        self._wake.set()
        try:
            async with asyncio.timeout(self._close_seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.debug("%d telemetry events were not delivered", len(self._queue))

    def _add(self, event: TelemetryEvent) -> bool:
        with self._lock:
            if len(self._queue) >= MAX_QUEUED_EVENTS:
                logger.debug("the telemetry queue is full, an event is dropped")
                return False
            self._queue.append(event)
            is_full_batch = len(self._queue) % MAX_BATCH_EVENTS == 0
        if is_full_batch:
            self._loop.call_soon_threadsafe(self._wake.set)
        return True

    def _take(self) -> list[TelemetryEvent]:
        with self._lock:
            count = min(len(self._queue), MAX_BATCH_EVENTS)
            return [self._queue.popleft() for _ in range(count)]

    async def _deliver(self, events: list[TelemetryEvent]) -> None:
        batch = TelemetrySendRequest(
            events=events,
            platform=platform.system(),
            sdk_version=PROTOCOL_VERSION,
            session_id=self._session_id,
            process_uuid=_process_uuid(),
        )
        try:
            await self._api.call(
                endpoints.TELEMETRY, batch, timeout_seconds=SEND_TIMEOUT_SECONDS, retry=SENDING
            )
        except Exception as error:
            logger.debug("telemetry is dropped: %s", error)

    def _common(self, severity: Severity) -> dict[str, Any]:
        with self._lock:
            index = self._index
            self._index += 1
        return {
            "event_id": str(uuid.uuid4()),
            "event_session_index": index,
            "severity": severity,
            "timestamp": datetime.now(UTC),
        }


_process: tuple[int, str] = (0, "")


def _process_uuid() -> str:
    """One per process; a forked child has its own."""
    global _process
    if _process[0] != os.getpid():
        _process = (os.getpid(), str(uuid.uuid4()))
    return _process[1]


def _jsonable(value: Any) -> Any:
    """Event data is free-form: what JSON cannot carry goes as text."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(v) for v in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
