"""Results: waiting for one, waiting for any of a sampler's, giving one up.

A question is held open until the answer is there or the time is up. "Not yet" is 408 with a body:
clients ask again at once either way, and this way without a line in their logs.
"""

from __future__ import annotations

import time
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import (
    Refusal,
    answer,
    check_still_known,
    leaving,
    not_found,
    while_connected,
)
from tinsmith.server.edge.routing import IN_THREAD_BYTES, route
from tinsmith.server.futures import Outcome, Promise, Promises
from tinsmith.server.sampling.requests import REQUEST_PREFIX
from tinsmith.server.service import Service
from tinsmith.server.store.records import OperationRecord
from tinsmith.types import (
    CancelFutureRequest,
    CreateCustomLossResponse,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    MetadataOnlyResponse,
    RequestErrorCategory,
    RequestFailedResponse,
    TryAgainResponse,
)
from tinsmith.types.protocol import JSON, PROTOBUF
from tinsmith.wire import dialects, endpoints, json, proto

UNLOAD_PREFIX = "unload-"
"""A model is unloaded as soon as that was asked for, so the request id says all there is."""


async def retrieve_future(
    service: Service, caller: Caller, request: Request, message: FutureRetrieveRequest
) -> RequestFailedResponse | MetadataOnlyResponse | Response:
    request_id = message.request_id
    if request_id.startswith(REQUEST_PREFIX):
        outcome = await _sampled(service, caller, request, request_id)
    else:
        outcome = await _trained(service, caller, request, request_id)
    await check_still_known(service, request)
    if outcome is None:
        return _try_again(service, request_id)
    if outcome.error is not None:
        category = RequestErrorCategory(outcome.category)
        return RequestFailedResponse(error=outcome.error, category=category)
    if message.allow_metadata_only and len(outcome.body) > service.config.metadata_only_bytes:
        return MetadataOnlyResponse(response_payload_size=len(outcome.body))
    is_protobuf = dialects.accepts_protobuf(request.headers.get("accept", ""))
    if outcome.result_type == "json" or is_protobuf:
        media = JSON if outcome.result_type == "json" else PROTOBUF
        return Response(outcome.body, media_type=media)
    if len(outcome.body) < IN_THREAD_BYTES:
        return Response(_as_json(outcome), media_type=JSON)
    body = await service.workers.run(caller.owner, _as_json, outcome)
    return Response(body, media_type=JSON)


async def retrieve_futures(
    service: Service, caller: Caller, request: Request, message: FuturesRetrieveRequest
) -> FuturesRetrieveResponse:
    target = message.target
    sampler = await service.samplers.get(target.sampling_session_id, caller.owner)
    if sampler is None:
        raise not_found("sampling session", target.sampling_session_id)
    service.sampling.promises.forget(
        [i for i in message.retrieved_request_ids if _is_own_sample(service, caller, i)]
    )
    seconds = service.config.hold_seconds
    if message.timeout is not None:
        seconds = min(max(0.0, message.timeout), seconds)
    client = (sampler.sampler_id, target.cloned_sampler_id)
    completions = service.sampling.completions.wait(client, message.prev_cursor, seconds)
    found = await while_connected(request, completions)
    await check_still_known(service, request)
    cursor = max((number for number, _ in found), default=message.prev_cursor)
    return FuturesRetrieveResponse(completions=[c for _, c in found], cursor=cursor)


async def cancel_future(
    service: Service, caller: Caller, request: Request, message: CancelFutureRequest
) -> None:
    if _is_own_sample(service, caller, message.request_id):
        await service.sampling.cancel(message.request_id)


async def _sampled(
    service: Service, caller: Caller, request: Request, request_id: str
) -> Outcome | None:
    promise = service.sampling.promises.get(request_id)
    if promise is None or promise.owner != caller.owner:
        raise Refusal(410, f"the result of {request_id[:80]} has expired; send the request again")
    outcome = await _held(service, service.sampling.promises, promise, request)
    if outcome is not None:
        service.sampling.promises.mark_retrieved(promise, time.time())
    return outcome


async def _trained(
    service: Service, caller: Caller, request: Request, request_id: str
) -> Outcome | None:
    promise = service.promises.get(request_id)
    if promise is not None:
        if promise.owner != caller.owner:
            raise not_found("request", request_id)
        outcome = await _held(service, service.promises, promise, request)
        if outcome is not None:
            service.promises.mark_retrieved(promise, time.time())
    elif request_id.startswith(UNLOAD_PREFIX):
        return await _unloaded(service, caller, request_id)
    else:
        outcome = await _stored(service, caller, request_id)
    if outcome is not None:
        service.retrieved[request_id] = time.time()
    return outcome


async def _unloaded(service: Service, caller: Caller, request_id: str) -> Outcome:
    model_id = request_id.removeprefix(UNLOAD_PREFIX)
    model = await service.store.models.get(model_id)
    if model is None or model.owner != caller.owner:
        raise not_found("request", request_id)
    body = json.encode({"model_id": model_id, "type": "unload_model"})
    return Outcome(result_type="json", body=body)


async def _held(
    service: Service, promises: Promises, promise: Promise, request: Request
) -> Outcome | None:
    """Wait for a promise for as long as the client does, and no longer than we hold anybody."""
    if promise.outcome is not None:
        return promise.outcome
    with leaving(request) as left:
        return await promises.wait(promise, service.config.hold_seconds, left)


async def _stored(service: Service, caller: Caller, request_id: str) -> Outcome | None:
    operation = await service.store.log.get(request_id)
    if operation is not None and operation.owner == caller.owner:
        return _end_of(operation)
    loss = await service.store.losses.of_request(request_id)
    if loss is None or loss.owner != caller.owner:
        raise not_found("request", request_id)
    return Outcome(
        result_type="json", body=json.encode(CreateCustomLossResponse(loss_id=loss.loss_id))
    )


def _end_of(operation: OperationRecord) -> Outcome | None:
    if operation.status == "pending":
        return None
    if operation.status == "failed":
        return Outcome(error=operation.error or "", category=operation.category or "unknown")
    if operation.result_type == "dropped" or operation.result is None:
        raise Refusal(
            410, f"the result of {operation.request_id} has expired; send the request again"
        )
    result_type: Literal["output", "json"] = (
        "output" if operation.result_type == "output" else "json"
    )
    return Outcome(result_type=result_type, body=bytes(operation.result))


def _as_json(outcome: Outcome) -> bytes:
    is_output = outcome.result_type == "output"
    decode = proto.decode_output if is_output else proto.decode_sample
    return dialects.result_as_json(decode(outcome.body))


def _try_again(service: Service, request_id: str) -> Response:
    """Say honestly why there is no result yet."""
    if not service.engines.is_up:
        state: Literal["active", "paused_capacity"] = "paused_capacity"
        reason = service.engines.trouble
    else:
        state, reason = "active", None
    return answer(
        TryAgainResponse(request_id=request_id, queue_state=state, queue_state_reason=reason), 408
    )


def _is_own_sample(service: Service, caller: Caller, request_id: str) -> bool:
    promise = service.sampling.promises.get(request_id)
    return promise is not None and promise.owner == caller.owner


ROUTES = [
    route(endpoints.RETRIEVE_FUTURE, retrieve_future),
    route(endpoints.RETRIEVE_FUTURES, retrieve_futures),
    route(endpoints.CANCEL_FUTURE, cancel_future),
]
