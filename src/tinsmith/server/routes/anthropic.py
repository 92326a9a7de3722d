"""The Anthropic-compatible endpoints: messages, streamed or not, with tools, and their length."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.engine.base import TokensSampled
from tinsmith.server.chat.answering import Answer, Answering, find_model, prepare, render
from tinsmith.server.chat.anthropic import (
    block,
    blocks,
    error_body,
    message_body,
    read_messages,
    stop_reason,
)
from tinsmith.server.chat.replies import REVOKED, named_event, reply_streamed, reply_whole
from tinsmith.server.chat.tool_calls import ToolCall
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal
from tinsmith.server.edge.routing import route
from tinsmith.server.service import Service
from tinsmith.types import SampledSequence, SampleResponse
from tinsmith.wire import endpoints, json


async def messages(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    ask = await service.texts.run(caller.owner, read_messages, message)
    answering = await prepare(service, caller, ask)
    if answering.ask.stream:
        goodbye = named_event(error_body(401, REVOKED))
        return reply_streamed(service, request, _streamed(answering), goodbye)
    return await reply_whole(service, caller, request, answering, partial(_whole, answering))


async def count_tokens(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> dict[str, int]:
    ask = await service.texts.run(caller.owner, read_messages, message, is_counted_only=True)
    _, chosen = await find_model(service, caller, ask.model)
    prompt = await service.texts.run(caller.owner, render, chosen, ask)
    return {"input_tokens": prompt.length}


def _whole(answering: Answering, responses: list[SampleResponse]) -> bytes:
    (sequence,) = responses[0].sequences
    answer = answering.new_answer()
    content = blocks(answer.whole(sequence))
    reason = _reason(answer, sequence)
    body = message_body(
        answering.ask, content, reason, answering.num_prompt_tokens, len(sequence.tokens)
    )
    return json.encode({**body, "stop_sequence": answer.stopped_by})


async def _streamed(answering: Answering) -> AsyncGenerator[bytes, None]:
    answer = answering.new_answer()
    writing = _Blocks()
    start = message_body(answering.ask, [], None, answering.num_prompt_tokens, 0)
    yield named_event({"type": "message_start", "message": start})
    try:
        async with aclosing(answering.stream(answering.jobs[0])) as events:
            async for event in events:
                if isinstance(event, TokensSampled):
                    for new in writing.add(answer.add(event.tokens.tolist())):
                        yield named_event(new)
                else:
                    for new in [*writing.add(answer.finish()), *writing.close()]:
                        yield named_event(new)
                    yield named_event(_end(answer, event.sequences[0]))
    except Refusal as refusal:
        yield named_event(error_body(refusal.status, refusal.detail))
        return
    yield named_event({"type": "message_stop"})


def _end(answer: Answer, sequence: SampledSequence) -> dict[str, Any]:
    delta = {"stop_reason": _reason(answer, sequence), "stop_sequence": answer.stopped_by}
    usage = {"output_tokens": len(sequence.tokens)}
    return {"type": "message_delta", "delta": delta, "usage": usage}


def _reason(answer: Answer, sequence: SampledSequence) -> str:
    has_calls = answer.ended_with_calls(sequence.stop_reason)
    return stop_reason(sequence.stop_reason, answer.stopped_by, has_calls=has_calls)


class _Blocks:
    """The events that write content blocks, one after another."""

    def __init__(self) -> None:
        self._index = -1
        self._is_open = False

    def add(self, parts: list[str | ToolCall]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                if not self._is_open:
                    events += self._start(block(""))
                events.append(self._delta({"type": "text_delta", "text": part}))
            else:
                written = block(part)
                events += [*self.close(), *self._start({**written, "input": {}})]
                delta = {"type": "input_json_delta", "partial_json": part.arguments_json}
                events += [self._delta(delta), *self.close()]
        return events

    def close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": self._index}]

    def _start(self, first: dict[str, Any]) -> list[dict[str, Any]]:
        self._index += 1
        self._is_open = True
        return [{"type": "content_block_start", "index": self._index, "content_block": first}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


ROUTES = [
    route(endpoints.ANTHROPIC_MESSAGES, messages, errors=error_body),
    route(endpoints.ANTHROPIC_COUNT_TOKENS, count_tokens, errors=error_body),
]
