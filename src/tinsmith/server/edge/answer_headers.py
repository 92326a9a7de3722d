"""What every answer says to browsers unless it says otherwise, as the console's pages do."""

from __future__ import annotations

from starlette.types import Message, Send

FIXED_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""On every answer, also on those that the HTTP server makes: nothing is framed or guessed at."""

DEFAULT_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""On answers that have no such header: they are not pages, and are not cached."""

_DEFAULTS = [(name.encode(), value.encode()) for name, value in DEFAULT_HEADERS.items()]


def with_defaults(send: Send) -> Send:
    async def send_headed(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = message.setdefault("headers", [])
            names = {name for name, _ in given}
            message["headers"] = [*given, *(pair for pair in _DEFAULTS if pair[0] not in names)]
        await send(message)

    return send_headed
