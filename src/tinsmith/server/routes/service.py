"""What the service says about itself before anything is asked of it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import answer, read_body, route
from tinsmith.server.service import Service
from tinsmith.types import (
    AuthTokenResponse,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    SupportedModel,
)
from tinsmith.wire import dialects


async def client_config(service: Service, caller: Caller, request: Request) -> Response:
    dialects.decode(ClientConfigRequest, await read_body(service, request), service.limits)
    config = service.config
    return answer(
        ClientConfigResponse(
            # Without keys there is nothing to exchange; a client's key may then be anything.
            pjwt_auth_enabled=config.pjwt_auth_enabled and config.auth,
            parallel_fwdbwd_chunks=config.parallel_fwdbwd_chunks,
            proto_compress_fwdbwd=config.proto_compress_fwdbwd,
            create_model_via_load_weights=config.create_model_via_load_weights,
            sample_use_retrieve_futures=config.sample_use_retrieve_futures,
            custom_loss_server_side=config.custom_loss_server_side,
            sample_join_sampling_session=config.sample_join_sampling_session,
        )
    )


async def client_dynamic_config(service: Service, caller: Caller, request: Request) -> Response:
    dialects.decode(ClientConfigRequest, await read_body(service, request), service.limits)
    return answer(
        ClientDynamicConfigResponse(sample_cancel_enabled=service.config.sample_cancel_enabled)
    )


async def auth_token(service: Service, caller: Caller, request: Request) -> Response:
    token = service.auth.issue_token(caller, service.config.token_seconds)
    return answer(AuthTokenResponse(jwt=token))


async def get_server_capabilities(service: Service, caller: Caller, request: Request) -> Response:
    capabilities = await service.capabilities()
    return answer(
        GetServerCapabilitiesResponse(
            supported_models=[
                SupportedModel(
                    model_name=model.name,
                    max_context_length=model.max_context_length,
                    trainable=model.is_trainable,
                    sampleable=model.is_sampleable,
                )
                for model in capabilities.models
            ]
        )
    )


ROUTES = [
    route(
        "POST",
        "/client/config",
        client_config,
        takes=ClientConfigRequest,
        gives=ClientConfigResponse,
    ),
    route(
        "POST",
        "/client/dynamic_config",
        client_dynamic_config,
        takes=ClientConfigRequest,
        gives=ClientDynamicConfigResponse,
    ),
    route("POST", "/auth/token", auth_token, gives=AuthTokenResponse),
    route(
        "GET",
        "/get_server_capabilities",
        get_server_capabilities,
        gives=GetServerCapabilitiesResponse,
    ),
]
