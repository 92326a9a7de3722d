"""Samples token by token, as they are decoded.

The request is that of a sample, posted to `/sample_stream`; the answer is a stream of server-sent
events:

    event: tokens   {"index": 0, "tokens": [791], "logprobs": [-0.3]}
    event: finish   {"index": 0, "stop_reason": "stop"}      once for each sequence
    event: error    {"error": "…", "category": "server"}     instead of what was to come

The hosted service has no such endpoint; ours does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import orjson

from tinsmith.client.connection import Connection
from tinsmith.client.futures import AwaitableConcurrentFuture, explain_blocking
from tinsmith.errors import APIConnectionError, APIResponseValidationError, RequestFailedError
from tinsmith.transport.base import ConnectionClass, Response
from tinsmith.transport.sse import Event, events
from tinsmith.types import RequestErrorCategory, SampleRequest, StopReason
from tinsmith.types.model import Response as Message

EVENT_STREAM = "text/event-stream"


class StreamedTokens(Message):
    """Some tokens of one sequence."""

    index: int = 0
    """Which of the sequences asked for."""
    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason | None = None
    """Set on the last piece of a sequence, which may have no tokens."""


class SampleStream:
    """For a plain or an async loop; leaving the loop cancels the sample.

        for piece in sampling.stream(prompt, params): print(piece.tokens)

    Memory does not grow with the length: the server is read as fast as the loop takes.
    """

    def __init__(self, connection: Connection, request: SampleRequest) -> None:
        self._connection = connection
        self._request = request

    def __iter__(self) -> Iterator[StreamedTokens]:
        explain_blocking("a plain loop over a stream", "use async for")
        pieces = self._pieces()
        try:
            while (piece := self._next(pieces).result()) is not None:
                yield piece
        finally:
            self._connection.submit(pieces.aclose).result()

    async def __aiter__(self) -> AsyncIterator[StreamedTokens]:
        pieces = self._pieces()
        try:
            while (piece := await self._next(pieces)) is not None:
                yield piece
        finally:
            await self._connection.submit(pieces.aclose)

    def _next(self, pieces: Any) -> AwaitableConcurrentFuture[StreamedTokens | None]:
        async def step() -> StreamedTokens | None:
            found: StreamedTokens | None = await anext(pieces, None)
            return found

        return self._connection.submit(step)

    async def _pieces(self) -> Any:  # an async generator, driven on the I/O loop alone
        api = self._connection.api
        left = self._request.num_samples
        async with api.stream(
            "POST",
            "/sample_stream",
            connection=ConnectionClass.SAMPLE,
            message=self._request,
            headers={"Accept": EVENT_STREAM},
        ) as (head, body):
            if head.media_type != EVENT_STREAM:
                raise APIResponseValidationError(
                    head, None, f"expected an event stream, got {head.media_type or 'no type'!r}"
                )
            async with aclosing(events(body)) as stream:  # type: ignore[type-var]  # a generator
                async for event in stream:
                    piece = _piece(event, head)
                    left -= piece.stop_reason is not None
                    yield piece
                    if left == 0:
                        return
        raise APIConnectionError(head.request, "The stream ended before its sequences did.")


def _piece(event: Event, head: Response) -> StreamedTokens:
    try:
        content = orjson.loads(event.data)
        if event.event == "error":
            raise RequestFailedError(
                f"Sample failed: {content.get('error')}",
                request_id=str(content.get("request_id", "")),
                category=RequestErrorCategory(content.get("category", "unknown")),
            )
        if event.event == "finish":
            return StreamedTokens(
                index=content.get("index", 0), tokens=[], stop_reason=content["stop_reason"]
            )
        return StreamedTokens.model_validate(content)
    except (ValueError, KeyError, AttributeError) as error:
        raise APIResponseValidationError(
            head, event.data, f"not an event of a sample: {event.data[:200]!r} ({error})"
        ) from error
