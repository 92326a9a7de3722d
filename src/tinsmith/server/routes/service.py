"""What the service says about itself before anything is asked of it."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.errors import ValidationError
from tinsmith.server import downloads
from tinsmith.server.chat.tokenizer_files import find_file, tokenizer_files
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
from tinsmith.types.tokenizers import TokenizerFilesResponse
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


async def list_tokenizer_files(
    service: Service, caller: Caller, request: Request
) -> TokenizerFilesResponse:
    """Of a model that is not served there are none: its checkpoints may outlive it here."""
    name = request.query_params.get("base_model")
    if name is None:
        raise ValidationError("name the model whose tokenizer is asked for", "base_model")
    base = await service.base_model(name)
    files = [] if base is None else await asyncio.to_thread(tokenizer_files, base)
    return TokenizerFilesResponse(base_model=name, files=files)


async def get_tokenizer_file(service: Service, caller: Caller, request: Request) -> Response:
    sha256 = request.path_params["sha256"]
    models = (await service.capabilities()).models
    path = await asyncio.to_thread(find_file, models, sha256)
    if path is None:
        raise Refusal(404, "no tokenizer of a served model has a file of that hash")
    content = downloads.file_content(sha256, path.parent, path.name)
    return await downloads.respond(request, content, partial(service.disk.run, caller.owner))


ROUTES = [
    route(endpoints.CLIENT_CONFIG, client_config),
    route(endpoints.CLIENT_DYNAMIC_CONFIG, client_dynamic_config),
    bare_route(endpoints.AUTH_TOKEN, auth_token),
    bare_route(endpoints.GET_SERVER_CAPABILITIES, get_server_capabilities),
    bare_route(endpoints.LIST_TOKENIZER_FILES, list_tokenizer_files),
    bare_route(endpoints.GET_TOKENIZER_FILE, get_tokenizer_file),
]
