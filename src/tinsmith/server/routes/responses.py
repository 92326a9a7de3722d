"""OpenAI's Responses API: a conversation answered with items, whole or as events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.engine.base import TokensSampled
from tinsmith.server.chat.answering import Answering, prepare
from tinsmith.server.chat.openai import error_body
from tinsmith.server.chat.replies import REVOKED, named_event, reply_streamed, reply_whole
from tinsmith.server.chat.responses import (
    call_item,
    ended,
    finished,
    message_item,
    output_items,
    read_response,
    response_body,
    text_part,
)
from tinsmith.server.chat.tool_calls import ToolCall
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal
from tinsmith.server.edge.routing import route
from tinsmith.server.service import Service
from tinsmith.types import SampleResponse
from tinsmith.wire import endpoints, json


async def responses(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    ask = await service.texts.run(caller.owner, read_response, message)
    answering = await prepare(service, caller, ask)
    body = response_body(message, answering.ask)
    if answering.ask.stream:
        goodbye = named_event(_error(REVOKED, 0))
        return reply_streamed(service, request, _streamed(answering, body), goodbye)
    return await reply_whole(service, caller, request, answering, partial(_whole, answering, body))


def _whole(answering: Answering, body: dict[str, Any], responses: list[SampleResponse]) -> bytes:
    (response,) = responses
    items = output_items(answering.new_answer().whole(response.sequences[0]))
    return json.encode(_ended(answering, body, items, response))


async def _streamed(answering: Answering, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    numbers = itertools.count()
    try:
        async with aclosing(_events(answering, body)) as events:
            async for event in events:
                yield named_event({**event, "sequence_number": next(numbers)})
    except Refusal as refusal:
        yield named_event(_error(refusal.detail, next(numbers)))


async def _events(
    answering: Answering, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    answer = answering.new_answer()
    items = _Items()
    yield {"type": "response.created", "response": body}
    yield {"type": "response.in_progress", "response": body}
    async with aclosing(answering.stream(answering.jobs[0])) as sampled:
        async for event in sampled:
            if isinstance(event, TokensSampled):
                for new in items.add(answer.add(event.tokens.tolist())):
                    yield new
            else:
                for new in [*items.add(answer.finish()), *items.close()]:
                    yield new
                whole = _ended(answering, body, items.done, event)
                yield {"type": f"response.{whole['status']}", "response": whole}


def _ended(
    answering: Answering,
    body: dict[str, Any],
    items: list[dict[str, Any]],
    response: SampleResponse,
) -> dict[str, Any]:
    (sequence,) = response.sequences
    num_cached = response.prompt_cache_hit_tokens or 0
    usage = (answering.num_prompt_tokens, num_cached, len(sequence.tokens))
    return ended(body, items, sequence.stop_reason, usage)


class _Items:
    """The events that write output items, one after another."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []

    def add(self, parts: list[str | ToolCall]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if isinstance(part, str):
                if self._open is None:
                    yield from self._start(message_item())
                self._texts.append(part)
                yield self._text_event("response.output_text.delta", delta=part, logprobs=[])
            else:
                yield from self.close()
                yield from self._call(part)

    def close(self) -> Iterator[dict[str, Any]]:
        """End the message that is being written."""
        if self._open is None:
            return
        text = "".join(self._texts)
        item = finished(self._open, text)
        yield self._text_event("response.output_text.done", text=text, logprobs=[])
        yield self._text_event("response.content_part.done", part=text_part(text))
        yield from self._end(item)

    def _start(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open, self._texts = item, []
        yield self._item_event("response.output_item.added", item)
        yield self._text_event("response.content_part.added", part=text_part(""))

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item = call_item(call)
        place = {"item_id": item["id"], "output_index": len(self.done)}
        arguments = call.arguments_json
        kind = "response.function_call_arguments"
        yield self._item_event("response.output_item.added", item)
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "name": call.name, "arguments": arguments}
        yield from self._end(finished(item, arguments))

    def _end(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield self._item_event("response.output_item.done", item)
        self.done.append(item)
        self._open = None

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.done), "item": item}

    def _text_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None, "a message is being written"
        place = {"item_id": self._open["id"], "output_index": len(self.done), "content_index": 0}
        return {"type": kind, **place, **fields}


def _error(message: str, number: int) -> dict[str, Any]:
    return {
        "type": "error",
        "code": None,
        "message": message,
        "param": None,
        "sequence_number": number,
    }


ROUTES = [route(endpoints.OPENAI_RESPONSES, responses, errors=error_body)]
