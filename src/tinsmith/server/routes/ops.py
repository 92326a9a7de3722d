"""For those who run the server: is it alive, can it serve, what is it doing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server.edge.http import answer
from tinsmith.server.edge.routing import open_route
from tinsmith.server.service import Service
from tinsmith.types import HealthResponse
from tinsmith.wire import endpoints


async def healthz(service: Service, request: Request) -> HealthResponse:
    return HealthResponse(status="ok")


async def readyz(service: Service, request: Request) -> Response:
    if service.is_draining or not service.engines.is_up:
        reason = "the server is stopping" if service.is_draining else service.engines.trouble
        return answer({"status": "not ready", "detail": reason}, 503)
    return answer({"status": "ready"})


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


ROUTES = [
    open_route(endpoints.API_HEALTHZ, healthz),
    open_route(endpoints.HEALTHZ, healthz),
    open_route(endpoints.READYZ, readyz),
    open_route(endpoints.METRICS, metrics),
]
