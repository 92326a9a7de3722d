"""What a client reports about itself."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from tinsmith.types.convert import Tagged
from tinsmith.types.model import Request, Response

EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class SessionStartEvent(Response):
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class SessionEndEvent(Response):
    duration: str
    """Elapsed time as H:MM:SS.ffffff."""
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class UnhandledExceptionEvent(Response):
    error_message: str
    error_type: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    traceback: str | None = None


class GenericEvent(Response):
    event: EventType
    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    event_data: dict[str, object] = {}


TelemetryEvent = Annotated[
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent,
    Tagged(
        "event",
        (
            ("SESSION_START", "SessionStartEvent"),
            ("SESSION_END", "SessionEndEvent"),
            ("UNHANDLED_EXCEPTION", "UnhandledExceptionEvent"),
            ("GENERIC_EVENT", "GenericEvent"),
        ),
    ),
]


class TelemetrySendRequest(Request):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetryBatch(Response):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetryResponse(Response):
    status: Literal["accepted"]
