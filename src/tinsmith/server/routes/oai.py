"""The OpenAI-compatible endpoints: poke at a base model or a checkpoint with any OpenAI client.

What a client asks for and we cannot do is refused by name; nothing is dropped in silence.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.engine.base import SampleJob, TokensSampled
from tinsmith.engine.images import token_row
from tinsmith.server.chat.answering import Answer, Answering, find_sampler, prepare
from tinsmith.server.chat.ask import Ask
from tinsmith.server.chat.generate import generated, read_generate
from tinsmith.server.chat.openai import (
    Asked,
    Echo,
    choice,
    completion,
    described,
    error_body,
    read_chat,
    read_completion,
)
from tinsmith.server.chat.replies import REVOKED, reply_streamed, reply_whole
from tinsmith.server.chat.tool_calls import ToolCall, joined
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.service import Service
from tinsmith.types import SampledSequence, SampleResponse
from tinsmith.wire import endpoints, json


async def list_models(service: Service, caller: Caller, request: Request) -> dict[str, Any]:
    models = (await service.capabilities()).models
    page = await service.store.checkpoints.page_of_owner(caller.owner, 1000, 0)
    data = [
        _model_card(m.name, max_model_len=m.max_context_length) for m in models if m.is_sampleable
    ]
    data += [_model_card(c.tinker_path) for c in page.items if c.checkpoint_type == "sampler"]
    return {"object": "list", "data": data}


async def get_model(service: Service, caller: Caller, request: Request) -> dict[str, Any]:
    name = request.path_params["model"]
    sampler = await find_sampler(service, caller, name)
    base = await service.base_model(sampler.base_model)
    if base is None or sampler.weights_id is not None:
        return _model_card(name)
    return _model_card(name, max_model_len=base.max_context_length)


def _model_card(name: str, **more: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tinsmith", **more}


async def completions(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    ask = await service.texts.run(caller.owner, read_completion, message)
    return await _respond(service, caller, request, ask)


async def chat_completions(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    ask = await service.texts.run(caller.owner, read_chat, message)
    return await _respond(service, caller, request, ask)


async def generate(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    ask = await service.texts.run(caller.owner, read_generate, message)
    answering = await prepare(service, caller, ask)
    return await reply_whole(service, caller, request, answering, partial(_generated, answering))


def _generated(answering: Answering, responses: list[SampleResponse]) -> bytes:
    (response,) = responses
    body = generated(
        answering.jobs[0].job_id,
        _prompt(answering, 0),
        response.sequences,
        with_logprobs=answering.ask.with_logprobs,
    )
    return json.encode_long(body, "choices")


async def _respond(service: Service, caller: Caller, request: Request, ask: Ask) -> Response:
    answering = await prepare(service, caller, ask)
    asked = Asked(
        ask=ask,
        answer_id=f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        num_prompt_tokens=answering.num_prompt_tokens,
    )
    if ask.stream:
        goodbye = _event(error_body(401, REVOKED))
        return reply_streamed(service, request, _streamed(answering, asked), goodbye)
    write = partial(_completed, asked, answering)
    return await reply_whole(service, caller, request, answering, write)


def _completed(asked: Asked, answering: Answering, responses: list[SampleResponse]) -> bytes:
    choices: list[dict[str, Any]] = []
    for number, response in enumerate(responses):
        echo = _echo(answering, number, response) if asked.ask.echo else None
        for sequence in response.sequences:
            answer = answering.new_answer()
            content, calls = joined(answer.whole(sequence))
            reason = _reason(answer, sequence)
            number_so_far = len(choices)
            choices.append(
                choice(asked, number_so_far, content, calls, reason, sequence, answering.text, echo)
            )
            if asked.ask.with_token_ids and not asked.ask.is_chat:
                choices[-1]["prompt_token_ids"] = _prompt(answering, number)
    sampled = sum(len(s.tokens) for r in responses for s in r.sequences)
    body = completion(asked, choices, sampled)
    if asked.ask.with_token_ids and asked.ask.is_chat:
        body["prompt_token_ids"] = _prompt(answering, 0)
    return json.encode_long(body, "choices")


def _prompt(answering: Answering, number: int) -> list[int]:
    """With the model's token for an image wherever a part of one is."""
    tokens: list[int] = token_row(answering.jobs[number].prompt, answering.images).tolist()
    return tokens


def _echo(answering: Answering, number: int, response: SampleResponse) -> Echo:
    given = answering.ask.prompts[number]
    prompt = _prompt(answering, number)
    nothing: list[None] = [None] * len(prompt)
    return Echo(
        prompt,
        given if isinstance(given, str) else answering.text.decode(prompt),
        response.prompt_logprobs or list(nothing),
        response.topk_prompt_logprobs or list(nothing),
    )


async def _streamed(answering: Answering, asked: Asked) -> AsyncGenerator[bytes, None]:
    """Server-sent events, token by token; leaving gives the job up and frees its place."""
    try:
        for number, job in enumerate(answering.jobs):
            async for chunk in _stream_job(answering, job, number, asked):
                yield _event(chunk)
    except Refusal as refusal:
        yield _event(error_body(refusal.status, refusal.detail))
    if asked.ask.include_usage:
        yield _event(asked.usage_chunk())
    yield b"data: [DONE]\n\n"


async def _stream_job(
    answering: Answering, job: SampleJob, number: int, asked: Asked
) -> AsyncIterator[dict[str, Any]]:
    first = number * job.num_samples
    answers = [answering.new_answer() for _ in range(job.num_samples)]
    num_calls = [0] * job.num_samples
    num_characters = [0] * job.num_samples
    """Of the tokens that came, each by itself."""

    def deltas(index: int, parts: list[str | ToolCall]) -> list[dict[str, Any]]:
        found = []
        for part in parts:
            if isinstance(part, ToolCall):
                call = {"index": num_calls[index], **described(part)}
                num_calls[index] += 1
                found.append({"tool_calls": [call]})
            else:
                found.append(asked.delta(part))
        return found

    for index in range(job.num_samples):
        if asked.ask.is_chat:
            yield asked.chunk(first + index, {"role": "assistant", "content": ""})
    async with aclosing(answering.stream(job)) as events:
        async for event in events:
            if isinstance(event, TokensSampled):
                new = deltas(event.index, answers[event.index].add(event.tokens.tolist()))
                asked.num_sampled_tokens += len(event.tokens)
                top = None if event.topk is None else event.topk.to_lists()
                tokens = event.tokens.tolist()
                logprobs = asked.logprobs(
                    tokens,
                    event.logprobs.tolist(),
                    answering.text,
                    top,
                    num_characters[event.index],
                )
                if logprobs is not None:
                    texts = map(answering.text.token_text, tokens)
                    num_characters[event.index] += sum(map(len, texts))
                if not new and logprobs is not None:
                    new = [asked.delta("")]
                for delta in new:
                    yield asked.chunk(first + event.index, delta, logprobs=logprobs)
                    logprobs = None
            else:
                for index, sequence in enumerate(event.sequences):
                    for delta in deltas(index, answers[index].finish()):
                        yield asked.chunk(first + index, delta)
                    reason = _reason(answers[index], sequence)
                    yield asked.chunk(first + index, asked.delta(""), reason=reason)


def _reason(answer: Answer, sequence: SampledSequence) -> str:
    return "tool_calls" if answer.ended_with_calls(sequence.stop_reason) else sequence.stop_reason


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.encode(data) + b"\n\n"


ROUTES = [
    bare_route(endpoints.OPENAI_MODELS, list_models, errors=error_body),
    bare_route(endpoints.OPENAI_MODEL, get_model, errors=error_body),
    route(endpoints.OPENAI_COMPLETIONS, completions, errors=error_body),
    route(endpoints.OPENAI_CHAT_COMPLETIONS, chat_completions, errors=error_body),
    route(endpoints.OPENAI_GENERATE, generate, errors=error_body),
]
