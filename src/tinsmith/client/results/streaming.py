"""Samples token by token, as they are decoded.

The request is that of a sample, posted to `/sample_stream`; the answer is a stream of server-sent
events:

    event: tokens   {"index": 0, "tokens": [791], "logprobs": [-0.3]}
    event: finish   {"index": 0, "stop_reason": "stop"}      once for each sequence
    event: error    {"error": "…", "category": "server"}     instead of what was to come

The hosted service has no such endpoint; ours does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any

import orjson

from tinsmith.client.futures import explain_blocking
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.errors import APIConnectionError, APIResponseValidationError, RequestFailedError
from tinsmith.transport.base import Response
from tinsmith.transport.retry import RetryPolicy
from tinsmith.transport.sse import Event, events
from tinsmith.types import RequestErrorCategory, SampleRequest, StopReason
from tinsmith.types.model import Response as Message
from tinsmith.types.protocol import EVENT_STREAM
from tinsmith.wire import endpoints


class StreamedTokens(Message):
    """Some tokens of one sequence."""

    index: int = 0
    """Which of the sequences asked for."""
    tokens: list[int]
    logprobs: list[float] | None = None
    stop_reason: StopReason | None = None
    """Set on the last piece of a sequence, which may have no tokens."""


class SampleStream:
    """A sample as a loop, plain or async; leaving the loop cancels the sample.

        for piece in sampling.stream(prompt, params): print(piece.tokens)

    Memory does not grow with the length: the server is read as fast as the loop takes.
    """

    def __init__(self, uplink: Uplink, request: SampleRequest, policy: RetryPolicy) -> None:
        """`policy` is for opening the stream; one that breaks later is not begun again."""
        self._uplink = uplink
        self._request = request
        self._policy = policy

    def __repr__(self) -> str:
        return f"<SampleStream from {self._request.sampling_session_id!r}>"

    def __iter__(self) -> Iterator[StreamedTokens]:
        explain_blocking("a plain loop over a stream", "use async for")
        reader = _Reader(self._pieces())
        try:
            while (piece := self._uplink.submit(reader.next).result()) is not None:
                yield piece
        finally:
            self._uplink.submit(reader.close).result()

    async def __aiter__(self) -> AsyncIterator[StreamedTokens]:
        reader = _Reader(self._pieces())
        try:
            while (piece := await self._uplink.submit(reader.next)) is not None:
                yield piece
        finally:
            await self._uplink.submit(reader.close)

    async def _pieces(self) -> Any:  # an async generator, driven on the I/O loop alone
        left = self._request.num_samples
        async with AsyncExitStack() as stack:
            head, body = await self._uplink.api.repeater.run(
                lambda _: stack.enter_async_context(self._opened()), self._policy
            )
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

    def _opened(self) -> AbstractAsyncContextManager[tuple[Response, AsyncIterator[bytes]]]:
        return self._uplink.api.stream(endpoints.SAMPLE_STREAM, self._request)


class _Reader:
    """Takes pieces one at a time, on the I/O loop alone."""

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces
        self._waiting: asyncio.Task[Any] | None = None

    async def next(self) -> StreamedTokens | None:
        """None at the end."""
        self._waiting = asyncio.current_task()
        piece: StreamedTokens | None = await anext(self._pieces, None)
        return piece

    async def close(self) -> None:
        """Stop, also while a piece is awaited (Ctrl-C): nobody wants it any more."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        await self._pieces.aclose()


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
