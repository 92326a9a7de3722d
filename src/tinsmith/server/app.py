"""The ASGI application: every route, around one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server.http import answer, detail_body, open_route
from tinsmith.server.openapi import description
from tinsmith.server.routes import (
    account,
    checkpoints,
    futures,
    oai,
    ops,
    runs,
    sampling,
    sessions,
    telemetry,
    training,
    weights,
)
from tinsmith.server.routes import (
    service as service_routes,
)
from tinsmith.server.service import Service

ROUTES = [
    *service_routes.ROUTES,
    *sessions.ROUTES,
    *training.ROUTES,
    *weights.ROUTES,
    *checkpoints.ROUTES,
    *runs.ROUTES,
    *account.ROUTES,
    *sampling.ROUTES,
    *futures.ROUTES,
    *telemetry.ROUTES,
    *oai.ROUTES,
    *ops.ROUTES,
]


async def openapi(service: Service, request: Request) -> Response:
    return answer(description(ROUTES, version("tinsmith")))


def build_app(service: Service) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = Starlette(
        routes=[*ROUTES, open_route("GET", "/openapi.json", openapi, prefix="")],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method: in the same form as every other refusal."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return answer(detail_body(error.status_code, error.detail), error.status_code, headers)
