"""Checkpoints: listing, publishing, expiry, deleting, and fetching their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from email.utils import format_datetime
from functools import partial
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.server import downloads
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import check_signature, moment, not_found, query_int, signed_url
from tinsmith.server.edge.lists import check_listed_bytes, listed
from tinsmith.server.edge.routing import bare_route, open_route, route
from tinsmith.server.service import Service
from tinsmith.server.store.records import CheckpointRecord
from tinsmith.types import (
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    Cursor,
    ExternalWeightsUrlsResponse,
    SetCheckpointTtlRequest,
)
from tinsmith.wire import endpoints

_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


async def list_run_checkpoints(
    service: Service, caller: Caller, request: Request
) -> CheckpointsListResponse:
    run_id = request.path_params["run_id"]
    model = await service.store.models.get(run_id)
    if model is None or model.owner != caller.owner:
        raise not_found("training run", run_id)

    async def read(limit: int, offset: int) -> Sequence[CheckpointRecord]:
        checkpoints = service.store.checkpoints
        check_listed_bytes(await checkpoints.metadata_bytes(run_id, limit, offset))
        return await checkpoints.of_model(run_id, limit, offset)

    found = await listed(request, read, "ask for parts with limit and offset, or GET /checkpoints")
    return await service.texts.run(caller.owner, _list_message, found)


async def list_checkpoints(
    service: Service, caller: Caller, request: Request
) -> CheckpointsListResponse:
    limit = query_int(request, "limit", 100, most=1000)
    offset = query_int(request, "offset", 0, most=2**53)
    page = await service.store.checkpoints.page_of_owner(caller.owner, limit, offset)
    return CheckpointsListResponse(
        checkpoints=[checkpoint_message(c) for c in page.items],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total),
    )


async def delete_checkpoint(service: Service, caller: Caller, request: Request) -> None:
    checkpoint = await _owned(service, caller, request)
    await service.checkpoints.delete(checkpoint)
    service.events.checkpoint_changed(checkpoint)


async def publish(service: Service, caller: Caller, request: Request) -> None:
    # Publishing what is public already changes nothing; a 409 would be retried for minutes.
    await _publish(service, caller, request, is_public=True)


async def unpublish(service: Service, caller: Caller, request: Request) -> None:
    await _publish(service, caller, request, is_public=False)


async def set_ttl(
    service: Service, caller: Caller, request: Request, message: SetCheckpointTtlRequest
) -> None:
    checkpoint = await _owned(service, caller, request)
    await service.checkpoints.set_ttl(checkpoint, message.ttl_seconds)
    service.events.checkpoint_changed(checkpoint)


async def external_weights_urls(
    service: Service, caller: Caller, request: Request
) -> ExternalWeightsUrlsResponse:
    checkpoint = await _owned(service, caller, request)
    expires = int(time.time()) + service.config.signed_url_seconds
    weights_id = (await service.checkpoints.weights_of(checkpoint)).weights_id
    names = await service.weights.files(weights_id)
    urls = await service.storage.urls(weights_id, names, service.config.signed_url_seconds)
    if urls is None:
        urls = {
            name: signed_url(service, f"/files/{weights_id}/{quote(name)}", expires)
            for name in names
        }
    return ExternalWeightsUrlsResponse(urls=urls, expires=moment(expires))


async def archive(
    service: Service, caller: Caller, request: Request
) -> CheckpointArchiveUrlResponse | Response:
    """For clients up to 0.35.0: the place of a tar file, as JSON or as a redirect."""
    checkpoint = await _owned(service, caller, request)
    expires = int(time.time()) + service.config.signed_url_seconds
    url = signed_url(service, f"/archives/{checkpoint.weights_id}.tar", expires)
    # Releases up to 0.22.1 read the redirect only; they send two Accept headers.
    if "application/gzip" not in ",".join(request.headers.getlist("accept")):
        return CheckpointArchiveUrlResponse(url=url, expires=moment(expires))
    when = format_datetime(moment(expires), usegmt=True)
    return Response(status_code=302, headers={"location": url, "expires": when})


async def get_file(service: Service, request: Request) -> Response:
    """One file of some weights, for whoever has a signed URL."""
    weights_id, name = request.path_params["weights_id"], request.path_params["name"]
    check_signature(service, request)
    if name not in await service.weights.files(weights_id):
        raise not_found("file", name)
    reading = partial(service.weights.reading, weights_id)
    digests = partial(_digest, service, weights_id)
    async with reading() as folder:
        content = downloads.file_content(weights_id, folder, name)
        return await downloads.respond(request, content, digests, reading)


async def get_archive(service: Service, request: Request) -> Response:
    """All files of some weights as a tar, for whoever has a signed URL."""
    weights_id = request.path_params["weights_id"]
    check_signature(service, request)
    names = await service.weights.files(weights_id)
    if not names:
        raise not_found("archive", weights_id)
    reading = partial(service.weights.reading, weights_id)
    digests = partial(_digest, service, weights_id)
    async with reading() as folder:
        content = downloads.archive_content(weights_id, folder, names)
        return await downloads.respond(request, content, digests, reading)


async def _digest(
    service: Service,
    weights_id: str,
    work_out: Callable[[downloads.Content], bytes],
    content: downloads.Content,
) -> bytes:
    """In the turn of whoever has the weights: a signed URL does not say who asks."""
    owner = await service.store.checkpoints.owner_of(weights_id)
    return await service.disk.run(owner, work_out, content)


def _list_message(found: Sequence[CheckpointRecord]) -> CheckpointsListResponse:
    return CheckpointsListResponse(checkpoints=[checkpoint_message(c) for c in found])


def checkpoint_message(checkpoint: CheckpointRecord) -> Checkpoint:
    return Checkpoint.model_validate(
        {
            "checkpoint_id": checkpoint.checkpoint_id,
            "checkpoint_type": checkpoint.checkpoint_type,
            "time": moment(checkpoint.created_at),
            "tinker_path": checkpoint.tinker_path,
            "size_bytes": checkpoint.size_bytes,
            "public": checkpoint.is_public,
            "user_metadata": checkpoint.user_metadata,
            "expires_at": None if checkpoint.expires_at is None else moment(checkpoint.expires_at),
        }
    )


async def _publish(service: Service, caller: Caller, request: Request, *, is_public: bool) -> None:
    checkpoint = await _owned(service, caller, request)
    await service.checkpoints.publish(checkpoint, is_public=is_public)
    service.events.checkpoint_changed(checkpoint)


async def _owned(service: Service, caller: Caller, request: Request) -> CheckpointRecord:
    run_id, checkpoint_id = request.path_params["run_id"], _checkpoint_id(request)
    found = await service.checkpoints.owned(run_id, checkpoint_id, caller.owner)
    if found is None:
        raise not_found("checkpoint", f"tinker://{run_id}/{checkpoint_id}")
    return found


def _checkpoint_id(request: Request) -> str:
    return f"{request.path_params['kind']}/{request.path_params['name']}"


ROUTES = [
    bare_route(endpoints.LIST_CHECKPOINTS, list_checkpoints),
    bare_route(endpoints.LIST_RUN_CHECKPOINTS, list_run_checkpoints),
    bare_route(endpoints.LIST_MODEL_CHECKPOINTS, list_run_checkpoints),
    bare_route(endpoints.PUBLISH, publish),
    bare_route(endpoints.UNPUBLISH, unpublish),
    route(endpoints.SET_TTL, set_ttl),
    bare_route(endpoints.EXTERNAL_WEIGHTS_URLS, external_weights_urls),
    bare_route(endpoints.ARCHIVE, archive),
    bare_route(endpoints.DELETE_CHECKPOINT, delete_checkpoint),
    open_route(endpoints.GET_FILE, get_file),
    open_route(endpoints.GET_ARCHIVE, get_archive),
]
