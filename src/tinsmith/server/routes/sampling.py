"""Sampling sessions and sampling requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinsmith.engine.base import SampleJob, TokensSampled
from tinsmith.engine.images import ImageRules, count_images, has_images, with_joined_texts
from tinsmith.errors import EngineError, ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal, not_found, while_known
from tinsmith.server.edge.routing import IN_THREAD_BYTES, bare_route, route
from tinsmith.server.operations.codecs import JsonCodec
from tinsmith.server.routes.sessions import active_session
from tinsmith.server.routes.training import check_base_model, tokenizer_location
from tinsmith.server.sampling.requests import held_bytes, sample_job
from tinsmith.server.service import Service
from tinsmith.server.store.records import SamplerRecord
from tinsmith.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    ModelInput,
    ParsedCheckpointTinkerPath,
    SampleRequest,
    SampleResponse,
    UntypedAPIFuture,
)
from tinsmith.types.protocol import (
    EVENT_STREAM,
    MAX_SAMPLES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    sampler_id,
)
from tinsmith.types.sampling import SamplerInfo
from tinsmith.wire import endpoints, json

_RETRY_AFTER_MS = "1000"
_CODEC = JsonCodec(SampleRequest)
MAX_CHUNKS_ON_LOOP = 16
"""A prompt of more chunks is put together in a thread: 65,000 of a token each would hold up the
event loop for a third of a second."""


async def create_sampling_session(
    service: Service, caller: Caller, request: Request, message: CreateSamplingSessionRequest
) -> CreateSamplingSessionResponse:
    session = await active_session(service, caller, message.session_id)
    base_model, weights_id = await _source(service, caller, message)
    sampler = await service.samplers.create(
        SamplerRecord(
            sampler_id=sampler_id(session.session_id, message.sampling_session_seq_id),
            session_id=session.session_id,
            sampling_session_seq_id=message.sampling_session_seq_id,
            owner=caller.owner,
            base_model=base_model,
            model_path=message.model_path,
            weights_id=weights_id,
            created_at=time.time(),
            model_id=await _run_of(service, caller, message.model_path),
        )
    )
    if sampler is None:
        raise not_found("checkpoint", str(message.model_path))
    if not _is_for(sampler, message, base_model):
        raise ValidationError(
            f"{message.sampling_session_seq_id} is the number of another sampling session; "
            "take the next one",
            "sampling_session_seq_id",
        )
    return CreateSamplingSessionResponse(sampling_session_id=sampler.sampler_id)


async def join_sampling_session(
    service: Service, caller: Caller, request: Request, message: JoinSamplingSessionRequest
) -> JoinSamplingSessionResponse:
    sampler = await _owned_sampler(service, caller, message.sampling_session_id)
    counter = await service.store.samplers.join(sampler.sampler_id)
    return JoinSamplingSessionResponse(client_counter=counter)


async def get_sampler(service: Service, caller: Caller, request: Request) -> SamplerInfo:
    sampler = await _owned_sampler(service, caller, request.path_params["sampler_id"])
    return SamplerInfo(
        sampler_id=sampler.sampler_id,
        base_model=sampler.base_model,
        model_path=sampler.model_path,
        tokenizer_id=tokenizer_location(service, await service.base_model(sampler.base_model)),
    )


async def release_sampler(service: Service, caller: Caller, request: Request) -> None:
    """Not part of the protocol: the official client does not say so. Where others have joined it,
    the sampler stays, as those of named weights do."""
    sampler = await _owned_sampler(service, caller, request.path_params["sampler_id"])
    await service.samplers.release(sampler)


async def asample(
    service: Service, caller: Caller, request: Request, message: SampleRequest
) -> UntypedAPIFuture:
    sampler = await _sampler_of(service, caller, message)
    message = await _counted(service, sampler, message)
    promise, digest = None, ""
    if message.seq_id is not None:
        digest = await _digest(service, caller, message)
        promise = service.sampling.find(sampler.sampler_id, message.seq_id, digest)
    if promise is None:
        _check_room(service, sampler, message)
        promise = service.sampling.submit(sampler, message, digest)
    ids = [f"{promise.request_id}:{index}" for index in range(message.num_samples)]
    return UntypedAPIFuture(request_id=promise.request_id, sample_sequence_ids=ids)


async def sample_stream(
    service: Service, caller: Caller, request: Request, message: SampleRequest
) -> Response:
    """A sample token by token, as server-sent events: `tokens`, `finish` and `error`.

    Not part of the protocol: the official client has no such call. A client that leaves frees its
    place.
    """
    sampler = await _sampler_of(service, caller, message)
    message = await _counted(service, sampler, message)
    _check_room(service, sampler, message)
    job = replace(sample_job(uuid.uuid4().hex, sampler, message), stream=True)
    events = _events(service, sampler, job)
    goodbye = _event("error", error="the API key was revoked", category="user")
    stream = while_known(service, request, events, goodbye)
    return StreamingResponse(stream, media_type=EVENT_STREAM)


async def _events(
    service: Service, sampler: SamplerRecord, job: SampleJob
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(service.sampling.stream(sampler, job)) as events:
            async for event in events:
                if isinstance(event, TokensSampled):
                    tokens, logprobs = event.tokens.tolist(), event.logprobs.tolist()
                    yield _event("tokens", index=event.index, tokens=tokens, logprobs=logprobs)
                elif isinstance(event, SampleResponse):
                    for index, sequence in enumerate(event.sequences):
                        yield _event("finish", index=index, stop_reason=sequence.stop_reason)
                else:
                    yield _event("error", error=event.message, category=event.category)
    except EngineError as error:
        yield _event("error", error=f"the engine is restarting: {error}", category="server")


def _event(kind: str, **data: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + json.encode(data) + b"\n\n"


async def _source(
    service: Service, caller: Caller, message: CreateSamplingSessionRequest
) -> tuple[str, str | None]:
    """The base model to sample and the weights to put on it."""
    if message.model_path is None:
        if message.base_model is None:
            raise ValidationError("give base_model or model_path")
        await check_base_model(service, message.base_model)
        return message.base_model, None
    try:
        checkpoint = await service.checkpoints.readable(message.model_path, caller.owner)
    except ValidationError:
        raise not_found("checkpoint", message.model_path) from None
    weights = await service.checkpoints.loadable(checkpoint)
    if message.base_model not in (None, weights.base_model):
        raise ValidationError(
            f"{message.model_path} belongs to {weights.base_model!r}", "base_model"
        )
    await check_base_model(service, weights.base_model)
    return weights.base_model, weights.weights_id


def _is_for(sampler: SamplerRecord, message: CreateSamplingSessionRequest, base_model: str) -> bool:
    """Whether this is what was asked for, now or before. An unnamed sampler, which a save has made,
    is not; one of a checkpoint that was saved again since is."""
    is_unnamed = sampler.model_path is None and sampler.weights_id is not None
    asked = message.model_path, base_model
    return not is_unnamed and (sampler.model_path, sampler.base_model) == asked


async def _run_of(service: Service, caller: Caller, path: str | None) -> str | None:
    """The caller's run that a checkpoint belongs to."""
    if path is None:
        return None
    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    run = await service.store.models.get(run_id)
    return run_id if run is not None and run.owner == caller.owner else None


async def _owned_sampler(service: Service, caller: Caller, sampler_id: str) -> SamplerRecord:
    sampler = await service.samplers.get(sampler_id, caller.owner)
    if sampler is None:
        raise not_found("sampling session", sampler_id)
    return sampler


async def _sampler_of(service: Service, caller: Caller, message: SampleRequest) -> SamplerRecord:
    """The sampler that a checked request is for."""
    if message.sampling_session_id is None:
        raise ValidationError("the request needs this text", "sampling_session_id")
    sampler = await _owned_sampler(service, caller, message.sampling_session_id)
    service.sessions.touch(sampler.session_id)
    _check(message)
    return sampler


async def _counted(
    service: Service, sampler: SamplerRecord, message: SampleRequest
) -> SampleRequest:
    """The request with the number of tokens of every image, which the sampler's model reads, and
    with few chunks: each costs the event loop some microseconds on its way to the engine."""
    if len(message.prompt.chunks) <= MAX_CHUNKS_ON_LOOP and not has_images(message.prompt):
        return message
    base = await service.base_model(sampler.base_model)
    rules = None if base is None else base.images
    prompt = await service.workers.run(sampler.owner, _prepared, message.prompt, rules)
    return message.model_copy(update={"prompt": prompt})


def _prepared(prompt: ModelInput, rules: ImageRules | None) -> ModelInput:
    return with_joined_texts(count_images(prompt, rules, "prompt"))


async def _digest(service: Service, caller: Caller, message: SampleRequest) -> str:
    if message.prompt.nbytes < IN_THREAD_BYTES:
        return _CODEC.digest(message)
    return await service.workers.run(caller.owner, _CODEC.digest, message)


def _check_room(service: Service, sampler: SamplerRecord, message: SampleRequest) -> None:
    num_bytes = held_bytes(sample_job("", sampler, message))
    if not service.sampling.has_room(sampler.owner, 1, num_bytes):
        raise Refusal(
            429,
            "too many of your sampling requests are under way; wait and send this one again",
            {"retry-after-ms": _RETRY_AFTER_MS, "retry-after": "1"},
        )


def _check(message: SampleRequest) -> None:
    if not 1 <= message.num_samples <= MAX_SAMPLES:
        raise ValidationError(
            f"must be between 1 and {MAX_SAMPLES}, got {message.num_samples}", "num_samples"
        )
    stop = message.sampling_params.stop
    stops = [stop] if isinstance(stop, str) else stop or ()
    if len(stops) > MAX_STOPS or any(
        isinstance(each, str) and len(each) > MAX_STOP_CHARACTERS for each in stops
    ):
        raise ValidationError(
            f"at most {MAX_STOPS} entries of at most {MAX_STOP_CHARACTERS} characters",
            "sampling_params.stop",
        )
    if message.record_stability_info:
        raise ValidationError("this server records none", "record_stability_info")


ROUTES = [
    route(endpoints.CREATE_SAMPLING_SESSION, create_sampling_session),
    route(endpoints.JOIN_SAMPLING_SESSION, join_sampling_session),
    bare_route(endpoints.GET_SAMPLER, get_sampler),
    bare_route(endpoints.RELEASE_SAMPLER, release_sampler),
    route(endpoints.SAMPLE, asample),
    route(endpoints.SAMPLE_STREAM, sample_stream),
]
