"""What clients report about themselves. It is counted and let go, for it may hold secrets."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.errors import ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import answer, read_body, route
from tinsmith.server.service import Service
from tinsmith.types import TelemetryResponse, TelemetrySendRequest
from tinsmith.wire import json


async def telemetry(service: Service, caller: Caller, request: Request) -> Response:
    body = await read_body(service, request)
    try:
        events = json.parse(body, service.limits).get("events")
        service.metrics.count("telemetry_events", len(events) if isinstance(events, list) else 0)
    except ValidationError:
        # Anything but "accepted" makes clients send the same batch for ever.
        service.metrics.count("telemetry_unreadable")
    return answer(TelemetryResponse(status="accepted"))


ROUTES = [
    route("POST", "/telemetry", telemetry, takes=TelemetrySendRequest, gives=TelemetryResponse)
]
