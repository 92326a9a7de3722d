"""Saving and loading weights, asking about them, copying them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.errors import ValidationError
from tinsmith.server.checkpoints import check_ttl, checkpoint_name
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal, answer, not_found, read_body
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.encryption import read_recipients
from tinsmith.server.operations.codecs import LoadCodec, LoadRequest
from tinsmith.server.operations.intake import Recorded, submit
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.routes.sessions import active_session
from tinsmith.server.routes.training import (
    check_base_model,
    check_optimizer,
    new_model,
    room_for,
)
from tinsmith.server.service import Service
from tinsmith.server.store.errors import OverQuotaError
from tinsmith.server.store.records import CheckpointRecord
from tinsmith.types import (
    CopyWeightsRequest,
    CopyWeightsResponse,
    LoadWeightsRequest,
    LoraConfig,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    UntypedAPIFuture,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinsmith.types.protocol import JSON
from tinsmith.wire import dialects, endpoints, json

SaveRequest = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest


async def save_weights(service: Service, caller: Caller, request: Request) -> Response:
    return await _save(service, caller, request, "save_weights", SaveWeightsRequest)


async def save_weights_for_sampler(service: Service, caller: Caller, request: Request) -> Response:
    kind = "save_weights_for_sampler"
    return await _save(service, caller, request, kind, SaveWeightsForSamplerRequest)


async def save_weights_external(service: Service, caller: Caller, request: Request) -> Response:
    return await _save(
        service, caller, request, "save_weights_external", SaveWeightsExternalRequest
    )


async def _save(
    service: Service, caller: Caller, request: Request, kind: str, message: type[SaveRequest]
) -> Response:
    body = await read_body(service, request)

    async def check(wanted: SaveRequest, seq_id: int) -> None:
        checkpoint_name(wanted.path, seq_id)
        check_ttl(wanted.ttl_seconds)
        if isinstance(wanted, SaveWeightsExternalRequest) and wanted.age_encryption_recipients:
            read_recipients(wanted.age_encryption_recipients)
        try:
            await service.store.weights.check_quota(caller.owner)
        except OverQuotaError as error:
            raise Refusal(403, str(error)) from None

    return await submit(
        service,
        caller,
        kind=kind,
        body=body,
        content_type=JSON,
        decode=lambda: dialects.decode(message, body, service.limits),
        check=check,
    )


async def load_weights(service: Service, caller: Caller, request: Request) -> Response:
    body = await read_body(service, request)
    if json.parse(body, service.limits).get("model_id") is None:
        return await _create_from_weights(service, caller, body)

    async def check(load: LoadRequest, seq_id: int) -> None:
        if load.request.optimizer_config is not None:
            check_optimizer(load.request.optimizer_config)

    async def record(model: LiveModel, load: LoadRequest) -> Recorded:
        return Recorded(load, LoadCodec().encode(load), JSON)

    reader = await _reader(service, caller, json.parse(body).get("weights_access_token"))
    return await submit(
        service,
        caller,
        kind="load_weights",
        body=body,
        content_type=JSON,
        decode=lambda: LoadRequest(
            dialects.decode(LoadWeightsRequest, body, service.limits), reader
        ),
        check=check,
        record=record,
    )


async def _create_from_weights(service: Service, caller: Caller, body: bytes) -> Response:
    """One request instead of three: the model gets the checkpoint's configuration."""
    message = dialects.decode(LoadWeightsRequest, body, service.limits)
    if message.session_id is None or message.model_seq_id is None:
        raise ValidationError("give model_id and seq_id, or session_id and model_seq_id")
    session = await active_session(service, caller, message.session_id)
    reader = await _reader(service, caller, message.weights_access_token)
    weights = await service.checkpoints.loadable(await _readable(service, message.path, reader))
    if message.base_model not in (None, weights.base_model):
        raise ValidationError(
            f"{message.path} belongs to {weights.base_model!r}, not {message.base_model!r}",
            "base_model",
        )
    await check_base_model(service, weights.base_model)
    if message.optimizer_config is not None:
        check_optimizer(message.optimizer_config)
    lora = LoraConfig(**weights.lora)
    model = await new_model(
        service, session, message.model_seq_id, weights.base_model, lora, message.user_metadata
    )
    load = LoadRequest(message, reader)
    async with room_for(service, caller, model):
        request_id = await service.recorder.submit(
            owner=caller.owner,
            kind="load_weights",
            model_id=model.model_id,
            seq_id=0,
            body=LoadCodec().encode(load),
            content_type=JSON,
            request=load,
            new_model=model,
        )
    return answer(UntypedAPIFuture(request_id=request_id, model_id=model.model_id))


async def weights_info(
    service: Service, caller: Caller, request: Request, message: WeightsInfoRequest
) -> WeightsInfoResponse:
    checkpoint = await _readable(service, message.tinker_path, caller.owner)
    weights = await service.checkpoints.weights_of(checkpoint)
    lora = LoraConfig(**weights.lora)
    return WeightsInfoResponse(
        base_model=weights.base_model,
        is_lora=True,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


async def copy_weights(
    service: Service, caller: Caller, request: Request, message: CopyWeightsRequest
) -> CopyWeightsResponse:
    token = request.headers.get("x-tinker-weights-access-token") or message.weights_access_token
    reader = await _reader(service, caller, token)
    source = await _readable(service, message.source_path, reader)
    try:
        copied = await service.checkpoints.copy(
            source,
            caller.owner,
            project_id=message.destination_project_id,
            ttl_seconds=message.ttl_seconds,
            idempotency_key=request.headers.get("x-idempotency-key"),
        )
    except OverQuotaError as error:
        raise Refusal(403, str(error)) from None
    return CopyWeightsResponse(tinker_path=copied.tinker_path)


async def _readable(service: Service, tinker_path: str, reader: str) -> CheckpointRecord:
    try:
        return await service.checkpoints.readable(tinker_path, reader)
    except ValidationError:
        raise not_found("checkpoint", tinker_path) from None


async def _reader(service: Service, caller: Caller, token: object) -> str:
    """Whose right to read weights is used: the token's owner's, or else the caller's."""
    if not token:
        return caller.owner
    reader = await service.auth.resolve(str(token)) if service.config.auth else caller
    if reader is None:
        raise Refusal(403, "the weights access token is not known to this server")
    return reader.owner


ROUTES = [
    bare_route(endpoints.SAVE_WEIGHTS, save_weights),
    bare_route(endpoints.SAVE_WEIGHTS_FOR_SAMPLER, save_weights_for_sampler),
    bare_route(endpoints.SAVE_WEIGHTS_EXTERNAL, save_weights_external),
    bare_route(endpoints.LOAD_WEIGHTS, load_weights),
    route(endpoints.WEIGHTS_INFO, weights_info),
    route(endpoints.COPY_WEIGHTS, copy_weights),
]
