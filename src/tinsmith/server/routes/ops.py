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
    """Whether the server can serve; why not, in a few words.

    What the engine said, and which models it refused, is for those with a key: it may name
    folders, or quote what somebody sent.
    """
    reason = service.trouble
    status = {"status": "ready"} if reason is None else {"status": "not ready", "detail": reason}
    if service.epoch is not None:
        status["role"] = "leader"
    code = 200 if reason is None else 503
    placing = "" if service.cluster is None else service.cluster.trouble
    if placing:
        status["placement"] = "nothing new is placed: there is trouble with the cluster"
    if await service.auth.caller(request.headers) is None:
        return answer(status, code)
    if not (service.is_draining or service.engines.is_up):
        status["detail"] = service.engines.trouble
    if placing:
        status["placement"] = f"nothing new is placed: {placing}"
    refused = [{"name": model.name, "reason": model.reason} for model in service.refused_models]
    return answer({**status, "refused_models": refused}, code)


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


ROUTES = [
    open_route(endpoints.API_HEALTHZ, healthz),
    open_route(endpoints.HEALTHZ, healthz),
    open_route(endpoints.READYZ, readyz),
    open_route(endpoints.METRICS, metrics),
]
