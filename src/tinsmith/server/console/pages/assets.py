"""Static files, held in memory under a path that changes when any of them does.

So a browser may keep them for ever, and a path that is no file's leads nowhere. They are sent
compressed, as every browser takes them.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server.edge.http import answer, detail_body

_MEDIA_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_FOR_EVER = "public, max-age=31536000, immutable"


@cache
def static_files() -> dict[str, bytes]:
    """Every file, compressed, by its path below `static`; licences and notes are not served."""
    found: dict[str, bytes] = {}
    _collect(files(__package__) / "static", "", found)
    return found


@cache
def static_path() -> str:
    digest = hashlib.sha256()
    for name, content in sorted(static_files().items()):
        digest.update(name.encode() + b"\0" + content)
    return f"/console/static/{digest.hexdigest()[:12]}"


async def serve_static(request: Request) -> Response:
    name = request.path_params["name"]
    content = static_files().get(name)
    if content is None or not request.url.path.startswith(static_path() + "/"):
        return answer(detail_body(404, f"there is no file {name[:200]!r}"), 404)
    headers = {"cache-control": _FOR_EVER, "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    else:
        content = gzip.decompress(content)
    return Response(content, headers=headers, media_type=_media_type(name))


def _collect(folder: Traversable, prefix: str, found: dict[str, bytes]) -> None:
    for entry in folder.iterdir():
        name = prefix + entry.name.removesuffix(".gz")
        if entry.is_dir():
            _collect(entry, f"{name}/", found)
        elif _media_type(name) is not None:
            content = entry.read_bytes()
            is_compressed = entry.name.endswith(".gz")
            found[name] = content if is_compressed else gzip.compress(content, mtime=0)


def _media_type(name: str) -> str | None:
    return _MEDIA_TYPES.get("." + name.rpartition(".")[2])
