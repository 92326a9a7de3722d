"""One operation: a message that is answered with a promise, and the result that was promised."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from tinsmith.client.results.retrieval import json_kind, retrieve
from tinsmith.wire.endpoints import Promised

if TYPE_CHECKING:
    from tinsmith.client.results.queue_state import QueueStateObserver
    from tinsmith.client.uplink.uplink import Uplink

Req = TypeVar("Req")
Result = TypeVar("Result")


async def operate(
    uplink: Uplink,
    endpoint: Promised[Req, Result],
    message: Req,
    *,
    observer: QueueStateObserver | None = None,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> Result:
    """Send `message` in its `turn`, and wait for the result."""
    started = time.monotonic()
    with uplink.spans.span(
        endpoint.path.strip("/"),
        model_id=getattr(message, "model_id", None),
        seq_id=getattr(message, "seq_id", None),
    ):
        async with turn or contextlib.nullcontext():
            promise = await uplink.api.call(endpoint, message)
        return await retrieve(
            uplink,
            promise,
            json_kind(type(message).__name__.removesuffix("Request"), endpoint.result),
            roundtrip_seconds=time.monotonic() - started,
            observer=observer,
        )
