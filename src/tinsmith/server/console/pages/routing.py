"""Where each page is. The paths that the SDK's `get_console_url()` gives are among them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tinsmith.server.console.pages.assets import serve_static, static_path
from tinsmith.server.edge.http import FOR_BROWSERS, caller_of

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a page may load: files of this server and nothing else, and nothing inline."""

LOGIN, NOWHERE = "login", "nowhere"
PAGES = {
    "/": "runs",
    "/login": LOGIN,
    "/sessions": "sessions",
    "/sessions/{session_id}": "session",
    "/training_runs/{run_id}": "run",
    "/training_runs/{run_id}/operations": "operations",
    "/training_runs/{run_id}/steps/{step:int}": "step",
    "/checkpoints": "checkpoints",
    "/checkpoints/{run_id}/{checkpoint_id:path}": "checkpoint",
    "/compare": "compare",
    "/playground": "playground",
    "/usage": "usage",
    "/server": "server",
    "/keys": "keys",
    "/keys/{key_id}": "keys",
}
"""The template of each path. The module of the same name reads the path's parts in the browser."""


def page_routes() -> list[Route]:
    pages = [Route(path, _page(template), methods=["GET"]) for path, template in PAGES.items()]
    return [*pages, Route("/console/static/{digest}/{name:path}", serve_static, methods=["GET"])]


@cache
def render(template: str) -> str:
    return _templates().get_template(f"{template}.html").render(static=static_path(), page=template)


async def nowhere(request: Request) -> Response | None:
    """For a browser at an address that is no page's; None for a program."""
    is_browser = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    return await _page(NOWHERE, 404)(request) if is_browser else None


def _page(template: str, status: int = 200) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        if template != LOGIN and not await _is_known(request):
            wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"/login?{urlencode({'next': wanted})}", 303)
        headers = {"content-security-policy": POLICY}
        return Response(render(template), status, headers=headers, media_type="text/html")

    return respond


async def _is_known(request: Request) -> bool:
    """Whether a browser was let in. Pages hold no data, so this only spares it a detour."""
    request.scope[FOR_BROWSERS] = True
    return await caller_of(request.app.state.service, request) is not None


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("tinsmith.server.console.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
