"""What a session does in the background: it says that it is alive, refreshes its switches, and
tells the service about samples that nobody waits for any more.

None of it refers to the clients, so that a client which is dropped can be collected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from tinsmith.client.uplink.api import Api
from tinsmith.errors import APIStatusError, TinkerError
from tinsmith.transport.config import PROTOCOL_VERSION, ClientConfig
from tinsmith.transport.retry import NO_RETRY, RetryPolicy
from tinsmith.types import (
    CancelFutureRequest,
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    SessionHeartbeatRequest,
)
from tinsmith.wire import endpoints

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 10.0
CONFIG_TIMEOUT_SECONDS = 10.0
CANCEL_TIMEOUT_SECONDS = 30.0
CLOSING_SECONDS = 2.0
RELEASE_TIMEOUT_SECONDS = 10.0


async def heartbeat(
    api: Api, session_id: str, config: ClientConfig, ended: threading.Event
) -> None:
    """Send heartbeats until the service says that the session has ended (410); then set `ended`."""
    last_success = time.monotonic()
    while True:
        await asyncio.sleep(config.heartbeat_seconds)
        try:
            if not await is_alive(api, session_id):
                logger.info("Session %s has ended; its heartbeat stops.", session_id)
                ended.set()
                return
            last_success = time.monotonic()
        except Exception as error:
            silence = time.monotonic() - last_success
            if silence > config.timing.silence_seconds:
                logger.warning(
                    "No heartbeat of session %s got through for %.0f s (%s: %s). If this goes on, "
                    "the service will end the session.",
                    session_id,
                    silence,
                    type(error).__name__,
                    error,
                )


async def is_alive(api: Api, session_id: str) -> bool:
    """One heartbeat: False if the service says that the session has ended."""
    try:
        await api.send(
            endpoints.SESSION_HEARTBEAT,
            SessionHeartbeatRequest(session_id=session_id),
            timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            retry=NO_RETRY,
        )
    except APIStatusError as error:
        if error.status_code == 410:
            return False
        raise
    return True


async def release_sampler(api: Api, sampler_id: str) -> None:
    """Say that an unnamed sampler is no longer wanted; its weights then make room."""
    try:
        await api.send(
            endpoints.RELEASE_SAMPLER.at(sampler_id=sampler_id),
            None,
            timeout_seconds=RELEASE_TIMEOUT_SECONDS,
            retry=NO_RETRY,
        )
    except TinkerError as error:
        # A service that does not know the request keeps them until the session ends.
        logger.debug("Sampler %s was not released: %s", sampler_id, error)


class Switches:
    """The service's changing settings, from the last refresh."""

    def __init__(self, current: ClientDynamicConfigResponse) -> None:
        self.current = current

    async def keep_fresh(self, api: Api, least_seconds: float) -> None:
        """A failed refresh keeps what was known."""
        while True:
            await asyncio.sleep(max(self.current.refresh_interval_sec, least_seconds))
            try:
                self.current = await fetch_switches(api, NO_RETRY)
            except TinkerError as error:
                logger.debug("The dynamic config could not be refreshed: %s", error)


async def fetch_switches(api: Api, retry: RetryPolicy | None = None) -> ClientDynamicConfigResponse:
    return await api.call(
        endpoints.CLIENT_DYNAMIC_CONFIG,
        ClientConfigRequest(sdk_version=PROTOCOL_VERSION),
        timeout_seconds=CONFIG_TIMEOUT_SECONDS,
        retry=retry,
    )


class Cancellations:
    """Samples that were given up, told to the service in the background."""

    def __init__(self, api: Api, switches: Switches) -> None:
        self._api = api
        self._switches = switches
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def add(self, request_id: str) -> None:
        if self._switches.current.sample_cancel_enabled:
            self._queue.put_nowait(request_id)

    async def send_rest(self) -> None:
        """Tell the service about those that are left, without retries: the client is closing."""
        rest = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        sending = [asyncio.ensure_future(self._cancel(each, NO_RETRY)) for each in rest]
        if sending:
            _, late = await asyncio.wait(sending, timeout=CLOSING_SECONDS)
            for task in late:
                task.cancel()

    async def run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while (
                len(batch) < self._switches.current.sample_cancel_max_batch_size
                and not self._queue.empty()
            ):
                batch.append(self._queue.get_nowait())
            await asyncio.gather(*(self._cancel(request_id) for request_id in batch))

    async def _cancel(self, request_id: str, retry: RetryPolicy | None = None) -> None:
        try:
            await self._api.send(
                endpoints.CANCEL_FUTURE,
                CancelFutureRequest(request_id=request_id),
                timeout_seconds=CANCEL_TIMEOUT_SECONDS,
                retry=retry,
            )
        except Exception as error:
            # The service gives up the samples of a silent session by itself, later.
            logger.error("Sample %s could not be cancelled: %s", request_id, error)
