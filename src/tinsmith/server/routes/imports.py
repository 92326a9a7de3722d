"""Uploading an adapter that was trained elsewhere, and making a checkpoint of it."""

from __future__ import annotations

from starlette.requests import Request

from tinsmith.errors import ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal, read_body
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.routes.training import check_base_model
from tinsmith.server.service import Service
from tinsmith.server.store.errors import OverQuotaError
from tinsmith.types import LoraConfig
from tinsmith.types.imports import ImportWeightsRequest, ImportWeightsResponse
from tinsmith.wire import endpoints


async def put_piece(service: Service, caller: Caller, request: Request) -> None:
    number = request.path_params["number"]
    if not (number.isascii() and number.isdigit() and len(number) < 9):
        raise ValidationError(f"must be a number, got {number[:40]!r}", "number")
    await service.uploads.put(
        caller.owner,
        request.path_params["upload_id"],
        request.path_params["name"],
        int(number),
        await read_body(service, request),
    )


async def import_weights(
    service: Service, caller: Caller, request: Request, message: ImportWeightsRequest
) -> ImportWeightsResponse:
    await check_base_model(service, message.base_model)
    try:
        await service.store.weights.check_quota(caller.owner)
        checkpoint = await service.imports.run(caller.owner, message)
    except OverQuotaError as error:
        raise Refusal(403, str(error)) from None
    weights = await service.checkpoints.weights_of(checkpoint)
    return ImportWeightsResponse(
        tinker_path=checkpoint.tinker_path, lora_rank=LoraConfig(**weights.lora).rank
    )


ROUTES = [
    bare_route(endpoints.UPLOAD_PIECE, put_piece),
    route(endpoints.IMPORT_WEIGHTS, import_weights),
]
