"""How an answer in text leaves: whole, or event by event for as long as the caller's key is good.

What the APIs for text share; what a body or an event says is each route's own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinsmith.server.chat.answering import Answering
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import check_still_known, while_connected, while_known
from tinsmith.server.service import Service
from tinsmith.types import SampleResponse
from tinsmith.types.protocol import EVENT_STREAM, JSON
from tinsmith.wire import json

REVOKED = "the API key was revoked"


async def reply_whole(
    service: Service,
    caller: Caller,
    request: Request,
    answering: Answering,
    write: Callable[[list[SampleResponse]], bytes],
) -> Response:
    """Run all jobs, and write the body in a thread."""
    responses = await while_connected(request, answering.complete())
    await check_still_known(service, request)
    body = await service.texts.run(caller.owner, write, responses)
    return Response(body, media_type=JSON)


def reply_streamed(
    service: Service, request: Request, events: AsyncGenerator[bytes, None], goodbye: bytes
) -> Response:
    """`goodbye` is the last event where the key is revoked meanwhile."""
    stream = while_known(service, request, events, goodbye)
    return StreamingResponse(stream, media_type=EVENT_STREAM)


def named_event(data: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its `type`."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + json.encode(data) + b"\n\n"
