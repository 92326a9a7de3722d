"""The ASGI application: every route and the console's pages, around one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinsmith.server.console.pages.routing import nowhere, page_routes
from tinsmith.server.edge.answer_headers import with_defaults
from tinsmith.server.edge.http import answer, detail_body
from tinsmith.server.edge.openapi import description
from tinsmith.server.edge.origins import Origins
from tinsmith.server.edge.requests import ApiRequest
from tinsmith.server.edge.routing import ApiRoute, open_route
from tinsmith.server.routes import (
    account,
    anthropic,
    checkpoints,
    cluster,
    console,
    futures,
    imports,
    oai,
    observing,
    ops,
    responses,
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
from tinsmith.wire import endpoints


async def openapi(service: Service, request: Request) -> dict[str, Any]:
    return description(version("tinsmith"))


ROUTES = [
    *service_routes.ROUTES,
    *sessions.ROUTES,
    *training.ROUTES,
    *weights.ROUTES,
    *imports.ROUTES,
    *checkpoints.ROUTES,
    *runs.ROUTES,
    *observing.ROUTES,
    *account.ROUTES,
    *console.ROUTES,
    *cluster.ROUTES,
    *sampling.ROUTES,
    *futures.ROUTES,
    *telemetry.ROUTES,
    *oai.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *ops.ROUTES,
    open_route(endpoints.OPENAPI, openapi),
]
_ROOTS = {route.path.split("/")[1] for route in ROUTES}
"""Where the addresses for programs begin."""


class Application(Starlette):
    """Starlette, with a short way to the routes whose path has no parameters.

    Those are the ones that are asked thousands of times a second, and looking through all routes
    for them costs more than most of their work. Their endpoints answer every error themselves.
    Before all routes, requests that come from the wrong web pages are refused.
    """

    def __init__(self, routes: list[ApiRoute], origins: Origins, **options: Any) -> None:
        super().__init__(routes=[*routes, *page_routes()], **options)
        self._origins = origins
        self._direct = {
            (route.row.method, route.path): route.respond
            for route in routes
            if "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = None
        if scope["type"] == "http":
            send = with_defaults(send)
            request = ApiRequest(scope, receive, send)
            trouble = self._origins.trouble(scope["method"], request.headers)
            if trouble is not None:
                await answer(detail_body(403, trouble), 403)(scope, receive, send)
                return
            respond = self._direct.get((scope["method"], scope["path"]))
        if respond is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        response = await respond(request)
        await response(scope, receive, send)


def build_app(service: Service) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = Application(
        routes=ROUTES,
        origins=Origins(service.config),
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method: in the same form as every other refusal, except to a
    browser that is not at a program's address."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and request.url.path.split("/")[1] not in _ROOTS:
        page = await nowhere(request)
        if page is not None:
            return page
    headers = dict(error.headers) if error.headers else None
    return answer(detail_body(error.status_code, error.detail), error.status_code, headers)
