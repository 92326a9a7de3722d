"""One operation: a message that is answered with a promise, and the result that was promised."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from tinsmith.client.results.retrieval import json_kind, retrieve
from tinsmith.transport.base import ConnectionClass
from tinsmith.types import UntypedAPIFuture
from tinsmith.types.model import Model

if TYPE_CHECKING:
    from tinsmith.client.connection.connection import Connection
    from tinsmith.client.results.queue_state import QueueStateObserver

M = TypeVar("M", bound=Model)


async def operate(
    connection: Connection,
    path: str,
    message: Model,
    result: type[M],
    *,
    observer: QueueStateObserver | None = None,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> M:
    """Post `message` to `path` in its `turn`, and wait for the `result`."""
    started = time.monotonic()
    with connection.spans.span(
        path.strip("/"),
        model_id=getattr(message, "model_id", None),
        seq_id=getattr(message, "seq_id", None),
    ):
        async with turn or contextlib.nullcontext():
            promise = await connection.api.call(
                UntypedAPIFuture, "POST", path, connection=ConnectionClass.TRAIN, message=message
            )
        return await retrieve(
            connection,
            promise,
            json_kind(type(message).__name__.removesuffix("Request"), result),
            roundtrip_seconds=time.monotonic() - started,
            observer=observer,
        )
