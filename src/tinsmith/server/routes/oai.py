"""The OpenAI-compatible endpoints: poke at a base model or a checkpoint with any OpenAI client.

What a client asks for and we cannot do is refused by name; nothing is dropped in silence.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinsmith.engine.base import Failure, SampleJob, TokensSampled
from tinsmith.errors import EngineError, ValidationError
from tinsmith.server.chat.openai import (
    Ask,
    Asked,
    choice,
    completion,
    error_body,
    read_chat,
    read_completion,
)
from tinsmith.server.chat.text import TextStream
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import (
    Refusal,
    check_still_known,
    while_connected,
    while_known,
)
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.service import Service
from tinsmith.server.store.records import SamplerRecord
from tinsmith.text_model import TextModel
from tinsmith.types import ModelInput, SampledSequence, SampleResponse
from tinsmith.types.protocol import EVENT_STREAM, JSON
from tinsmith.wire import endpoints, json


async def list_models(service: Service, caller: Caller, request: Request) -> dict[str, Any]:
    models = (await service.capabilities()).models
    page = await service.store.checkpoints.page_of_owner(caller.owner, 1000, 0)
    names = [m.name for m in models if m.is_sampleable]
    names += [c.tinker_path for c in page.items if c.checkpoint_type == "sampler"]
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "tinsmith"} for name in names]
    return {"object": "list", "data": data}


async def completions(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    return await _respond(service, caller, request, read_completion(message))


async def chat_completions(
    service: Service, caller: Caller, request: Request, message: dict[str, Any]
) -> Response:
    return await _respond(service, caller, request, read_chat(message))


async def _respond(service: Service, caller: Caller, request: Request, ask: Ask) -> Response:
    sampler = await _sampler(service, caller, ask.model)
    base = await service.base_model(sampler.base_model)
    if base is None:
        raise Refusal(404, f"no base model called {sampler.base_model!r} is served")
    text = await asyncio.to_thread(service.text_models.get, base)
    prompts = await asyncio.to_thread(_prompts, text, ask)
    asked = Asked(
        ask=ask,
        answer_id=f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        num_prompt_tokens=sum(len(p) for p in prompts),
    )
    jobs = [_job(ask, sampler, prompt) for prompt in prompts]
    num_bytes = sum(job.prompt.nbytes for job in jobs)
    if not service.sampling.has_room(caller.owner, len(jobs), num_bytes):
        problem = f"{len(jobs)} more prompts are too many at once; wait, or send fewer"
        raise Refusal(429, problem, {"retry-after": "1"})
    if ask.stream:
        events = _streamed(service, sampler, jobs, asked, text)
        goodbye = _event(error_body(401, "the API key was revoked"))
        stream = while_known(service, request, events, goodbye)
        return StreamingResponse(stream, media_type=EVENT_STREAM)
    responses = await while_connected(request, _run_all(service, sampler, jobs))
    await check_still_known(service, request)
    body = await service.workers.run(caller.owner, _completed, asked, text, responses)
    return Response(body, media_type=JSON)


def _completed(asked: Asked, text: TextModel, responses: list[SampleResponse]) -> bytes:
    choices: list[dict[str, Any]] = []
    for response in responses:
        for sequence in response.sequences:
            whole = _whole(text, asked.ask, sequence)
            choices.append(choice(asked, len(choices), whole, sequence, text))
    sampled = sum(len(s.tokens) for r in responses for s in r.sequences)
    return json.encode_long(completion(asked, choices, sampled), "choices")


async def _run_all(
    service: Service, sampler: SamplerRecord, jobs: list[SampleJob]
) -> list[SampleResponse]:
    """All jobs at once; the first that fails, or leaving, gives the others up."""
    tasks = [asyncio.create_task(_run(service, sampler, job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _run(service: Service, sampler: SamplerRecord, job: SampleJob) -> SampleResponse:
    try:
        async with aclosing(service.sampling.stream(sampler, job)) as events:
            async for event in events:
                if isinstance(event, Failure):
                    raise _refusal(event)
                if isinstance(event, SampleResponse):
                    return event
    except EngineError as error:
        raise Refusal(503, f"the engine is restarting: {error}") from None
    raise Refusal(503, "the engine gave no result")


async def _streamed(
    service: Service,
    sampler: SamplerRecord,
    jobs: list[SampleJob],
    asked: Asked,
    text: TextModel,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, token by token; leaving gives the job up and frees its place."""
    try:
        for number, job in enumerate(jobs):
            async for chunk in _stream_job(service, sampler, job, number, asked, text):
                yield _event(chunk)
    except Refusal as refusal:
        yield _event(error_body(refusal.status, refusal.detail))
    except EngineError as error:
        yield _event(error_body(503, f"the engine is restarting: {error}"))
    if asked.ask.include_usage:
        yield _event(asked.usage_chunk())
    yield b"data: [DONE]\n\n"


async def _stream_job(
    service: Service,
    sampler: SamplerRecord,
    job: SampleJob,
    number: int,
    asked: Asked,
    text: TextModel,
) -> AsyncIterator[dict[str, Any]]:
    first = number * job.num_samples
    streams = [TextStream(text, asked.ask.stops) for _ in range(job.num_samples)]
    for index in range(job.num_samples):
        if asked.ask.is_chat:
            yield asked.chunk(first + index, {"role": "assistant", "content": ""})
    async with aclosing(service.sampling.stream(sampler, job)) as events:
        async for event in events:
            if isinstance(event, Failure):
                raise _refusal(event)
            if isinstance(event, TokensSampled):
                new = streams[event.index].add(event.tokens.tolist())
                asked.num_sampled_tokens += len(event.tokens)
                top = None if event.topk is None else event.topk.to_lists()
                logprobs = asked.logprobs(event.tokens.tolist(), event.logprobs.tolist(), text, top)
                if new or logprobs is not None:
                    yield asked.chunk(first + event.index, asked.delta(new), logprobs=logprobs)
            elif isinstance(event, SampleResponse):
                for index, sequence in enumerate(event.sequences):
                    rest = streams[index].finish()
                    if rest:
                        yield asked.chunk(first + index, asked.delta(rest))
                    yield asked.chunk(first + index, asked.delta(""), reason=sequence.stop_reason)


async def _sampler(service: Service, caller: Caller, model: str) -> SamplerRecord:
    """A sampler for this one request: a base model's, or a checkpoint's."""
    base_model, weights_id = model, None
    if model.startswith("tinker://"):
        try:
            checkpoint = await service.checkpoints.readable(model, caller.owner)
            weights = await service.checkpoints.weights_of(checkpoint)
        except ValidationError:
            raise Refusal(404, f"there is no checkpoint {model[:200]!r}") from None
        base_model, weights_id = weights.base_model, weights.weights_id
    elif await service.base_model(model) is None:
        if (reason := service.why_refused(model)) is not None:
            raise Refusal(404, f"{model!r} cannot be served: {reason}")
        served = ", ".join(m.name for m in (await service.capabilities()).models)
        raise Refusal(404, f"no model called {model[:200]!r}; served: {served or 'none'}")
    return SamplerRecord(
        sampler_id="oai",
        session_id="",
        sampling_session_seq_id=-1,
        owner=caller.owner,
        base_model=base_model,
        weights_id=weights_id,
        created_at=time.time(),
    )


def _prompts(text: TextModel, ask: Ask) -> list[list[int]]:
    if ask.is_chat:
        return [text.render_chat(ask.messages)]
    return [p if isinstance(p, list) else text.encode(p) for p in ask.prompts]


def _job(ask: Ask, sampler: SamplerRecord, prompt: list[int]) -> SampleJob:
    return SampleJob(
        job_id=f"oai-{uuid.uuid4().hex}",
        base_model=sampler.base_model,
        sampler_id=sampler.weights_id,
        prompt=ModelInput.from_ints(prompt),
        params=ask.params,
        num_samples=ask.n,
        topk_sample_logprobs=ask.top_logprobs,
        stream=ask.stream,
        scope=sampler.owner,
    )


def _whole(text: TextModel, ask: Ask, sequence: SampledSequence) -> str:
    stream = TextStream(text, ask.stops)
    return stream.add(sequence.tokens) + stream.finish()


def _refusal(failure: Failure) -> Refusal:
    return Refusal(400 if failure.category == "user" else 503, failure.message)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.encode(data) + b"\n\n"


ROUTES = [
    bare_route(endpoints.OPENAI_MODELS, list_models, errors=error_body),
    route(endpoints.OPENAI_COMPLETIONS, completions, errors=error_body),
    route(endpoints.OPENAI_CHAT_COMPLETIONS, chat_completions, errors=error_body),
]
