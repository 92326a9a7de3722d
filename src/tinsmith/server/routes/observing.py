"""Looking at a run: its curves, operations, queue, examples and samplers; for its owner alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.engine.base import BaseModelInfo
from tinsmith.errors import ValidationError
from tinsmith.server.console.events import operation_of
from tinsmith.server.console.queue import standing
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import answer, not_found, query_int
from tinsmith.server.edge.routing import bare_route, route
from tinsmith.server.service import Service
from tinsmith.server.store.observing.blocks import Summary
from tinsmith.server.store.records import (
    ExampleRecord,
    ModelRecord,
    OperationRecord,
    OperationStatus,
    SamplerStatsRecord,
    StepRecord,
)
from tinsmith.text_model import TextModel
from tinsmith.types.observing import (
    MAX_KEY_CHARACTERS,
    MAX_STEP,
    NO_TEXT,
    PostMetricsRequest,
    RunExample,
    RunExamplesResponse,
    RunOperation,
    RunOperationsResponse,
    RunQueueResponse,
    RunSampler,
    RunSamplersResponse,
)
from tinsmith.wire import endpoints

MAX_POINTS = 5000
MAX_EXAMPLES = 100
MAX_SAMPLERS = 1000


async def get_metrics(service: Service, caller: Caller, request: Request) -> Response:
    run = await _owned_run(service, caller, request)
    points = max(1, query_int(request, "points", 500, most=MAX_POINTS))
    after = query_int(request, "after", -1, least=-1, most=MAX_STEP)
    wanted = request.query_params.get("keys")
    operations = await service.store.curves.read(run.model_id, "operation", after, points)
    posted = await service.store.curves.read(run.model_id, "posted", after, points)
    keys = None if wanted is None else {key for key in wanted.split(",") if key}
    return await service.texts.run(caller.owner, _metrics_answer, operations, posted, keys)


def _metrics_answer(
    operations: Sequence[Summary], posted: Sequence[Summary], wanted: set[str] | None
) -> Response:
    """A name that the server and the client both use is the server's; the client's has a prefix."""
    ours = {key for summary in operations for key in summary.ranges}
    theirs = {key for summary in posted for key in summary.ranges}
    names = {("posted/" + key if key in ours else key): key for key in theirs}
    keys = sorted(ours | names.keys())
    series = {
        key: _series(posted, names[key], "step")
        if key in names
        else _series(operations, key, "seq")
        for key in keys
        if wanted is None or key in wanted
    }
    return answer({"keys": keys, "series": series})


def _series(summaries: Sequence[Summary], key: str, axis: str) -> dict[str, Any]:
    """Plain lists: a message would look at each of many thousands of numbers."""
    points = [(s.x, s.t, s.ranges[key]) for s in summaries if key in s.ranges]
    return {
        "axis": axis,
        "x": [x for x, _, _ in points],
        "t": [t for _, t, _ in points],
        "mean": [values[1] for _, _, values in points],
        "min": [values[2] for _, _, values in points],
        "max": [values[3] for _, _, values in points],
    }


async def post_metrics(
    service: Service, caller: Caller, request: Request, message: PostMetricsRequest
) -> None:
    run = await _owned_run(service, caller, request)
    for key in message.metrics:
        if not key or len(key) > MAX_KEY_CHARACTERS or "," in key:
            raise ValidationError(
                f"{key[:80]!r} cannot be a metric's name: use 1 to {MAX_KEY_CHARACTERS} "
                "characters without a comma",
                "metrics",
            )
    step = StepRecord(
        model_id=run.model_id, source="posted", seq_id=message.step, at=time.time(), kind="posted"
    )
    recorded = await service.posted.post(caller.owner, step, message.metrics)
    service.recorded(run, recorded.entry_id, recorded)


async def list_operations(
    service: Service, caller: Caller, request: Request
) -> RunOperationsResponse:
    run = await _owned_run(service, caller, request)
    limit = query_int(request, "limit", 100, most=1000)
    before = query_int(request, "before", MAX_STEP, most=MAX_STEP)
    status = _status(request)
    store, found = service.store, list[RunOperation]()
    if status in (None, "pending"):
        started = {o.record.request_id: o.started_at for o in service.scheduler.running()}
        for pending in await store.log.pending(run.model_id, before, limit):
            found.append(_pending(pending, started.get(pending.request_id)))
    if status != "pending":
        ended = await store.steps.newest(run.model_id, before, limit, status)
        found += map(operation_of, ended)
    # One that ended between the two questions is in both.
    by_number = {operation.seq: operation for operation in found}
    newest_first = sorted(by_number, reverse=True)[:limit]
    return RunOperationsResponse(operations=[by_number[number] for number in newest_first])


def _status(request: Request) -> OperationStatus | None:
    status = request.query_params.get("status")
    if status is not None and status not in get_args(OperationStatus):
        raise ValidationError(f"must be pending, done or failed, got {status[:40]!r}", "status")
    return cast("OperationStatus | None", status)


def _pending(operation: OperationRecord, started: float | None) -> RunOperation:
    return RunOperation(
        seq=operation.seq_id,
        kind=operation.kind,
        status="pending",
        submitted=operation.created_at,
        started=started,
        tokens=operation.num_tokens,
    )


async def get_queue(service: Service, caller: Caller, request: Request) -> RunQueueResponse:
    run = await _owned_run(service, caller, request)
    return standing(service, service.models.find(run.model_id))


async def list_examples(service: Service, caller: Caller, request: Request) -> RunExamplesResponse:
    run = await _owned_run(service, caller, request)
    limit = query_int(request, "limit", 20, most=MAX_EXAMPLES)
    step = query_int(request, "step", -1, least=-1, most=MAX_STEP)
    await service.sampled_examples.flush()
    found = await service.store.examples.of_run(run.model_id, None if step < 0 else step, limit)
    base = await service.base_model(run.base_model) if found else None
    shown = await service.texts.run(caller.owner, _examples, service, found, base)
    return RunExamplesResponse(examples=shown, is_recorded=service.config.keep_examples > 0)


async def list_samplers(service: Service, caller: Caller, request: Request) -> RunSamplersResponse:
    run = await _owned_run(service, caller, request)
    await service.sampler_stats.flush()
    found = await service.store.samplers.stats_of_run(run.model_id, MAX_SAMPLERS)
    made = await service.store.steps.made(run.model_id)
    return RunSamplersResponse(samplers=[_sampler(each, made) for each in found])


def _sampler(stats: SamplerStatsRecord, made: Mapping[str, int]) -> RunSampler:
    return RunSampler(
        sampler=stats.sampler_id,
        seq=made.get(stats.sampler_id),
        requests=stats.num_requests,
        sequences=stats.num_sequences,
        prompt_tokens=stats.prompt_tokens,
        sampled_tokens=stats.sampled_tokens,
        mean_length=stats.sampled_tokens / max(1, stats.num_sequences),
        longest=stats.longest_tokens,
        stopped_fraction=stats.num_stopped / max(1, stats.num_sequences),
        mean_logprob=stats.logprob_sum / max(1, stats.sampled_tokens),
        first=stats.first_at,
        last=stats.last_at,
    )


def _examples(
    service: Service, found: Sequence[ExampleRecord], base: BaseModelInfo | None
) -> list[RunExample]:
    """With the tokens as texts, or as their numbers where the server has no tokenizer."""
    tokenizer: TextModel | None = None
    if base is not None and base.tokenizer_folder is not None:
        with contextlib.suppress(ValidationError):
            tokenizer = service.text_models.get(base)

    def texts(ids: Sequence[int]) -> list[str]:
        text_of = str if tokenizer is None else tokenizer.token_text
        return ["[image]" if token == NO_TEXT else text_of(token) for token in ids]

    bodies = [(each.seq_id, orjson.loads(each.body)) for each in found]
    return [
        RunExample(
            step=step,
            tokens=texts(body["ids"]),
            prompt=texts(body["prompt_ids"]) if "prompt_ids" in body else None,
            **body,
        )
        for step, body in bodies
    ]


async def _owned_run(service: Service, caller: Caller, request: Request) -> ModelRecord:
    run_id = request.path_params["run_id"]
    run = await service.store.models.get(run_id)
    if run is None or run.owner != caller.owner:
        raise not_found("training run", run_id)
    return run


ROUTES = [
    bare_route(endpoints.GET_RUN_METRICS, get_metrics),
    route(endpoints.POST_RUN_METRICS, post_metrics),
    bare_route(endpoints.LIST_RUN_OPERATIONS, list_operations),
    bare_route(endpoints.GET_RUN_QUEUE, get_queue),
    bare_route(endpoints.LIST_RUN_EXAMPLES, list_examples),
    bare_route(endpoints.LIST_RUN_SAMPLERS, list_samplers),
]
