"""What clients report about themselves. It is counted and dropped, because it may hold secrets."""

from __future__ import annotations

from starlette.requests import Request

from tinsmith.errors import ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import read_body
from tinsmith.server.edge.routing import bare_route
from tinsmith.server.service import Service
from tinsmith.types import TelemetryResponse
from tinsmith.wire import endpoints, json


async def telemetry(service: Service, caller: Caller, request: Request) -> TelemetryResponse:
    body = await read_body(service, request)
    try:
        events = json.parse(body, service.limits).get("events")
        service.metrics.count("telemetry_events", len(events) if isinstance(events, list) else 0)
    except ValidationError:
        # Anything but "accepted" makes clients send the same batch for ever.
        service.metrics.count("telemetry_unreadable")
    return TelemetryResponse(status="accepted")


ROUTES = [
    bare_route(endpoints.TELEMETRY, telemetry),
]
