"""Telling the user that a service does not answer, while the client keeps trying."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from tinsmith.errors import APIConnectionError

logger = logging.getLogger(__name__)

SAY_AFTER_SECONDS = 2.0
SAY_AGAIN_AFTER_SECONDS = 60.0


class OutageNotice:
    """One line when an outage has lasted two seconds, one a minute after that, one at its end.

    All requests to one service share it: a thousand that wait are one outage.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._said_at: float | None = None

    def failed(self, error: Exception, lasting_seconds: float) -> None:
        """An attempt failed that is going to be repeated when the outage has lasted this long."""
        if not isinstance(error, APIConnectionError) or lasting_seconds < SAY_AFTER_SECONDS:
            return
        now = self._now()
        if self._said_at is not None and now - self._said_at < SAY_AGAIN_AFTER_SECONDS:
            return
        self._said_at = now
        logger.warning(
            "no answer from %s (%s); still trying. Is the server running, and is TINKER_BASE_URL "
            "its address?",
            _server(error),
            error.message.rpartition(": ")[2].rstrip("."),
        )

    def answered(self) -> None:
        if self._said_at is not None:
            self._said_at = None
            logger.warning("the service answers again")


def _server(error: APIConnectionError) -> str:
    parts = urlsplit(error.request.url)
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else "the service"
