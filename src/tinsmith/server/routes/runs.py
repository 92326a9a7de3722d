"""Training runs: every model that was ever created, with its newest checkpoints."""

from __future__ import annotations

import time

from starlette.requests import Request

from tinsmith.errors import ValidationError
from tinsmith.server.checkpoints import run_seen_by, seen_by
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import moment, not_found, query_int
from tinsmith.server.edge.routing import bare_route
from tinsmith.server.routes.checkpoints import checkpoint_message
from tinsmith.server.service import Service
from tinsmith.server.store.records import CheckpointRecord, ModelRecord
from tinsmith.types import Checkpoint, Cursor, LoraConfig, TrainingRunsResponse
from tinsmith.types.runs import TrainingRunDetails
from tinsmith.wire import endpoints


async def list_training_runs(
    service: Service, caller: Caller, request: Request
) -> TrainingRunsResponse:
    _check_scope(request)
    limit = query_int(request, "limit", 20, most=1000)
    offset = query_int(request, "offset", 0, most=2**53)
    project_id = request.query_params.get("project_id")
    page = await service.store.models.page_of_owner(caller.owner, limit, offset, project_id)
    return TrainingRunsResponse(
        training_runs=[run for model in page.items if (run := await _run(service, caller, model))],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total),
    )


async def get_training_run(
    service: Service, caller: Caller, request: Request
) -> TrainingRunDetails:
    run_id = request.path_params["run_id"]
    is_accessible = _check_scope(request) == "accessible"
    model = await service.store.models.get(run_id)
    if model is None or not (model.owner == caller.owner or is_accessible):
        raise not_found("training run", run_id)
    run = await _run(service, caller, model)
    if run is None:
        raise not_found("training run", run_id)
    return run


async def _run(service: Service, caller: Caller, model: ModelRecord) -> TrainingRunDetails | None:
    """A run as the caller may see it."""
    newest = await service.store.checkpoints.newest(
        model.model_id, time.time(), only_public=model.owner != caller.owner
    )
    checkpoints = [seen for each in newest if (seen := seen_by(caller.owner, each)) is not None]
    run = run_seen_by(caller.owner, model, checkpoints)
    return None if run is None else _run_message(run, checkpoints)


def _run_message(model: ModelRecord, checkpoints: list[CheckpointRecord]) -> TrainingRunDetails:
    lora = LoraConfig(**model.lora)
    return TrainingRunDetails(
        training_run_id=model.model_id,
        base_model=model.base_model,
        model_owner=model.owner,
        is_lora=True,
        corrupted=model.is_corrupted,
        lora_rank=lora.rank,
        lora_seed=lora.seed,
        last_request_time=moment(model.last_request_at),
        last_checkpoint=_of_type(checkpoints, "training"),
        last_sampler_checkpoint=_of_type(checkpoints, "sampler"),
        user_metadata=None
        if model.user_metadata is None
        else {key: str(value) for key, value in model.user_metadata.items()},
    )


def _of_type(checkpoints: list[CheckpointRecord], kind: str) -> Checkpoint | None:
    return next((checkpoint_message(c) for c in checkpoints if c.checkpoint_type == kind), None)


def _check_scope(request: Request) -> str:
    scope = request.query_params.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise ValidationError(f"must be owned or accessible, got {scope[:40]!r}", "access_scope")
    return scope


ROUTES = [
    bare_route(endpoints.LIST_TRAINING_RUNS, list_training_runs),
    bare_route(endpoints.GET_TRAINING_RUN, get_training_run),
]
