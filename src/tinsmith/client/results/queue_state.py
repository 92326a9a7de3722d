"""What the service says while a request waits in its queue, and telling the user now and then."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any

logger = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 60.0


class QueueState(Enum):
    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> QueueState:
        return cls.UNKNOWN


class QueueStateObserver(ABC):
    @abstractmethod
    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None: ...


class QueueStateLogger(QueueStateObserver):
    """Logs a pause with its reason, at most once a minute."""

    def __init__(self, what: str, rate_limit_reason: str) -> None:
        self._what = what
        self._reasons = {
            QueueState.PAUSED_RATE_LIMIT: rate_limit_reason,
            QueueState.PAUSED_CAPACITY: "the service is short of capacity, please wait",
        }
        self._last_logged: float | None = None

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        now = time.monotonic()
        if queue_state is QueueState.ACTIVE:
            return
        if self._last_logged is not None and now - self._last_logged < LOG_EVERY_SECONDS:
            return
        self._last_logged = now
        reason = queue_state_reason or self._reasons.get(queue_state, "unknown")
        logger.warning("%s is paused. Reason: %s", self._what, reason)


def tell(observer: QueueStateObserver | None, answer: Mapping[str, Any]) -> None:
    """Pass on what a "not yet" says; an observer that fails is the user's and stops nothing."""
    state, reason = answer.get("queue_state"), answer.get("queue_state_reason")
    if observer is None or not (state or reason):
        return
    try:
        observer.on_queue_state_change(QueueState(state), reason)
    except Exception:
        logger.exception("on_queue_state_change failed")
