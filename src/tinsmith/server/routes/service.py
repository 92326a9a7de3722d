"""What the service says about itself before anything is asked of it."""

from __future__ import annotations

import time

from starlette.requests import Request

from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.service import Service
from tinsmith.types import (
    AuthTokenResponse,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    SupportedModel,
)
from tinsmith.wire import endpoints

_RENEWAL_SECONDS = 300
"""How long before a token's end the official clients ask for the next one."""


async def client_config(
    service: Service, caller: Caller, request: Request, message: ClientConfigRequest
) -> ClientConfigResponse:
    config = service.config
    return ClientConfigResponse(
        # Without keys there is nothing to exchange; a client's key may then be anything.
        pjwt_auth_enabled=config.pjwt_auth_enabled and config.auth,
        parallel_fwdbwd_chunks=config.parallel_fwdbwd_chunks,
        proto_compress_fwdbwd=config.proto_compress_fwdbwd,
        create_model_via_load_weights=config.create_model_via_load_weights,
        sample_use_retrieve_futures=config.sample_use_retrieve_futures,
        custom_loss_server_side=config.custom_loss_server_side,
        sample_join_sampling_session=config.sample_join_sampling_session,
    )


async def client_dynamic_config(
    service: Service, caller: Caller, request: Request, message: ClientConfigRequest
) -> ClientDynamicConfigResponse:
    return ClientDynamicConfigResponse(sample_cancel_enabled=service.config.sample_cancel_enabled)


async def auth_token(service: Service, caller: Caller, request: Request) -> AuthTokenResponse:
    """A token for a key; for a token one that ends with it.

    A token near its end is refused: clients that hold nothing else would ask again and again.
    """
    ends = caller.token_expires_at
    if ends is not None and ends - time.time() < _RENEWAL_SECONDS:
        raise Refusal(403, "a token cannot be renewed by itself; send the key")
    token = service.auth.issue_token(caller, service.config.token_seconds)
    return AuthTokenResponse(jwt=token)


async def get_server_capabilities(
    service: Service, caller: Caller, request: Request
) -> GetServerCapabilitiesResponse:
    capabilities = await service.capabilities()
    return GetServerCapabilitiesResponse(
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


ROUTES = [
    route(endpoints.CLIENT_CONFIG, client_config),
    route(endpoints.CLIENT_DYNAMIC_CONFIG, client_dynamic_config),
    bare_route(endpoints.AUTH_TOKEN, auth_token),
    bare_route(endpoints.GET_SERVER_CAPABILITIES, get_server_capabilities),
]
