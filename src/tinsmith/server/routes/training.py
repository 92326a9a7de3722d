"""Creating models and training them. Everything here is answered with a promise."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.engine.base import BaseModelInfo
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal, body_start, read_body
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.metadata import size_of
from tinsmith.server.operations.codecs import pass_data
from tinsmith.server.operations.intake import Recorded, owned_model, refuse_unread, submit
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.recorded_pass import PassRequest, RecordedPass
from tinsmith.server.operations.sampled_experts import named_sequences, with_experts
from tinsmith.server.routes.futures import UNLOAD_PREFIX
from tinsmith.server.routes.sessions import active_session
from tinsmith.server.seeds import draw_seed
from tinsmith.server.service import Service
from tinsmith.server.store.errors import OverQuotaError
from tinsmith.server.store.records import (
    CustomLossRecord,
    ModelRecord,
    SessionRecord,
)
from tinsmith.types import (
    AdamOptimizerConfig,
    AdamParams,
    CreateCustomLossRequest,
    CreateModelRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    OptimizerConfigBase,
    OptimStepRequest,
    UnloadModelRequest,
    UntypedAPIFuture,
)
from tinsmith.types.custom_loss import CustomLossInput
from tinsmith.types.protocol import JSON, MAX_LOSS_INPUTS, PROTOBUF, loss_id, model_id
from tinsmith.wire import dialects, endpoints, json


async def create_model(service: Service, caller: Caller, request: Request) -> UntypedAPIFuture:
    body = await read_body(service, request)
    message = dialects.decode(CreateModelRequest, body, service.limits)
    session = await active_session(service, caller, message.session_id)
    await check_base_model(service, message.base_model)
    if message.lora_config is None:
        raise ValidationError(
            "without it all parameters would be trained, and this server trains LoRA adapters "
            'only; give it a rank, as in {"rank": 32}',
            "lora_config",
        )
    check_optimizer(message.optimizer_config)
    max_rank = (await service.capabilities()).max_lora_rank
    if not 1 <= message.lora_config.rank <= max_rank:
        raise ValidationError(
            f"must be between 1 and {max_rank}, got {message.lora_config.rank}", "lora_config.rank"
        )
    model = await new_model(
        service,
        session,
        message.model_seq_id,
        message.base_model,
        message.lora_config,
        message.user_metadata,
    )
    async with room_for(service, caller, model):
        request_id = await service.recorder.submit(
            owner=caller.owner,
            kind="create_model",
            model_id=model.model_id,
            seq_id=0,
            body=body,
            content_type=JSON,
            request=message,
            new_model=model,
        )
    return UntypedAPIFuture(request_id=request_id, model_id=model.model_id)


async def get_info(
    service: Service, caller: Caller, request: Request, message: GetInfoRequest
) -> GetInfoResponse:
    model = await owned_model(service, caller, message.model_id)
    base = await service.base_model(model.record.base_model)
    return GetInfoResponse(
        type="get_info",
        model_id=model.model_id,
        model_name=model.record.base_model,
        model_data=ModelData(
            arch=None if base is None else base.architecture,
            model_name=model.record.base_model,
            tokenizer_id=tokenizer_location(service, base),
        ),
        is_lora=True,
        lora_rank=model.lora.rank,
    )


async def forward_backward(service: Service, caller: Caller, request: Request) -> Response:
    return await _pass(service, caller, request, forward_only=False)


async def forward(service: Service, caller: Caller, request: Request) -> Response:
    return await _pass(service, caller, request, forward_only=True)


async def _pass(
    service: Service, caller: Caller, request: Request, *, forward_only: bool
) -> Response:
    content_type = request.headers.get("content-type", "")
    try:
        body = await read_body(service, request)
    except TooLargeError as error:
        if dialects.media_type(content_type) == PROTOBUF:
            await refuse_unread(service, caller, await body_start(service, request), str(error))
        raise

    async def check(message: PassRequest, seq_id: int) -> None:
        _, loss_fn, config, _ = pass_data(message)
        if loss_fn == "custom":
            _check_losses_are_run(service)
            await service.losses.note_use(str(config.get("loss_id")), caller.owner)

    async def record(model: LiveModel, message: PassRequest) -> Recorded:
        kept, base_model = service.sampling.experts, model.record.base_model
        known = named_sequences(message, kept, caller.owner, base_model) if kept else {}
        if not known:
            return Recorded(RecordedPass(message), body, content_type)
        found = await service.workers.run(
            caller.owner, with_experts, message, body, content_type, known
        )
        return Recorded(*found)

    return await submit(
        service,
        caller,
        kind=lambda r: "forward" if isinstance(r, ForwardRequest) else "forward_backward",
        body=body,
        content_type=content_type,
        decode=lambda: dialects.decode_pass(
            body, content_type, forward_only=forward_only, limits=service.limits
        ),
        check=check,
        record=record,
    )


async def optim_step(service: Service, caller: Caller, request: Request) -> Response:
    body = await read_body(service, request)

    def check(message: OptimStepRequest, seq_id: int) -> None:
        if not isinstance(message.optim_params, AdamParams):
            raise _no_optimizer(message.optim_params.type, "optimizer_params")

    return await submit(
        service,
        caller,
        kind="optim_step",
        body=body,
        content_type=JSON,
        decode=lambda: dialects.decode(OptimStepRequest, body, service.limits),
        check=check,
    )


async def unload_model(
    service: Service, caller: Caller, request: Request, message: UnloadModelRequest
) -> UntypedAPIFuture:
    """Old clients say when they are done with a model; it goes to disk."""
    model = await owned_model(service, caller, message.model_id)
    model.wants_unload = True
    service.scheduler.wake(model)
    # The request has no number, so it is no part of the log; its promise is kept already.
    request_id = f"{UNLOAD_PREFIX}{model.model_id}"
    return UntypedAPIFuture(request_id=request_id, model_id=model.model_id)


async def create_custom_loss(
    service: Service, caller: Caller, request: Request, message: CreateCustomLossRequest
) -> UntypedAPIFuture:
    _check_losses_are_run(service)
    session = await active_session(service, caller, message.session_id)
    _check_loss_inputs(message.inputs)
    definition = {
        "inputs": [i.to_wire() for i in message.inputs],
        "graph": message.graph.to_wire(),
    }
    at = time.time()
    loss = CustomLossRecord(
        loss_id=loss_id(session.session_id, message.custom_loss_seq_id),
        request_id=uuid.uuid4().hex,
        session_id=session.session_id,
        custom_loss_seq_id=message.custom_loss_seq_id,
        owner=caller.owner,
        name=message.name,
        definition=definition,
        num_bytes=len(json.encode(definition)),
        created_at=at,
        used_at=at,
    )
    try:
        recorded = await service.store.losses.add(loss)
    except OverQuotaError as error:
        raise Refusal(403, str(error)) from None
    if (recorded.name, recorded.definition) != (loss.name, loss.definition):
        raise ValidationError(
            f"{loss.custom_loss_seq_id} is the number of another loss of this session; "
            "take the next one",
            "custom_loss_seq_id",
        )
    return UntypedAPIFuture(request_id=recorded.request_id)


def _check_losses_are_run(service: Service) -> None:
    if not service.config.custom_loss_server_side:
        raise Refusal(
            403,
            "this server does not run uploaded losses; compute the loss with "
            "forward_backward_custom, or start the server with --set custom_loss_server_side=true",
        )


async def check_base_model(service: Service, name: str) -> None:
    if await service.base_model(name) is None:
        if (reason := service.why_refused(name)) is not None:
            raise ValidationError(f"{name!r} cannot be served: {reason}", "base_model")
        served = ", ".join(m.name for m in (await service.capabilities()).models)
        raise ValidationError(
            f"no base model called {name[:200]!r}; served: {served or 'none'}", "base_model"
        )


def check_optimizer(config: OptimizerConfigBase) -> None:
    if not isinstance(config, AdamOptimizerConfig):
        raise _no_optimizer(config.type, "optimizer_config")


def _no_optimizer(kind: str, path: str) -> ValidationError:
    return ValidationError(f"no optimizer called {kind[:40]!r}; known: adamw", path)


@asynccontextmanager
async def room_for(service: Service, caller: Caller, model: ModelRecord) -> AsyncIterator[None]:
    """While a new model is recorded, for which its owner must have room. One that was recorded
    before has it: its request has come again."""
    num_bytes = size_of(model.user_metadata, model.project_id)
    has_limit = num_bytes > 0 or service.config.key_max_models is not None
    if has_limit and await service.store.models.get(model.model_id) is not None:
        yield
        return
    await _check_model_limit(service, caller)
    try:
        async with service.metadata.taken(caller.owner, num_bytes):
            yield
    except OverQuotaError as error:
        raise Refusal(403, str(error)) from None


async def _check_model_limit(service: Service, caller: Caller) -> None:
    limit = service.config.key_max_models
    if limit is None:
        return
    count = await service.store.models.count_in_active_sessions(caller.owner)
    if count >= limit:
        raise Refusal(
            403,
            f"this key has {count} models in active sessions; at most {limit} are allowed, so "
            "finish a session first",
        )


async def new_model(
    service: Service,
    session: SessionRecord,
    model_seq_id: int,
    base_model: str,
    lora: LoraConfig,
    user_metadata: dict[str, object] | None,
) -> ModelRecord:
    """The record of a model to be. A seed is chosen here, so that a rebuilt model begins alike."""
    at = time.time()
    seed = lora.seed
    if seed is None:
        sessions = service.store.sessions
        seed = await draw_seed(service.config.seed, sessions, session, model_seq_id)
    return ModelRecord(
        model_id=model_id(session.session_id, model_seq_id),
        session_id=session.session_id,
        model_seq_id=model_seq_id,
        owner=session.owner,
        base_model=base_model,
        lora=lora.model_copy(update={"seed": seed}).to_wire(),
        optimizer=AdamOptimizerConfig().to_wire(),
        user_metadata=user_metadata,
        project_id=session.project_id,
        created_at=at,
        last_request_at=at,
    )


def tokenizer_location(service: Service, base: BaseModelInfo | None) -> str | None:
    """Where a client finds the tokenizer: on the same machine, in the model's own folder.

    Clients elsewhere go by the model's name, as they do when this is absent.
    """
    if base is None or base.tokenizer_folder is None or not service.config.is_loopback:
        return None
    folder = str(base.tokenizer_folder)
    # Clients cut the id at the first colon.
    return None if ":" in folder else folder


def _check_loss_inputs(inputs: list[CustomLossInput]) -> None:
    if not 1 <= len(inputs) <= MAX_LOSS_INPUTS or inputs[0].name != "logprobs":
        raise ValidationError(
            f"1 to {MAX_LOSS_INPUTS} inputs, of which 'logprobs' is the first", "inputs"
        )


ROUTES = [
    bare_route(endpoints.CREATE_MODEL, create_model),
    route(endpoints.GET_INFO, get_info),
    bare_route(endpoints.FORWARD_BACKWARD, forward_backward),
    bare_route(endpoints.FORWARD, forward),
    bare_route(endpoints.OPTIM_STEP, optim_step),
    route(endpoints.UNLOAD_MODEL, unload_model),
    route(endpoints.CREATE_CUSTOM_LOSS, create_custom_loss),
]
