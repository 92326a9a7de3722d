"""From a request body to a recorded operation: the part that all training endpoints share.

A request that is refused still uses up its number: the client has counted on, and the operations
behind it must not wait for one that will never come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response

from tinsmith.engine.images import ImageRules, count_images, has_images
from tinsmith.errors import TooLargeError, ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import Refusal, answer, not_found
from tinsmith.server.edge.workers import LARGE_PASS_BYTES
from tinsmith.server.operations.codecs import pass_data
from tinsmith.server.operations.kinds import KINDS
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.operation import PassKind
from tinsmith.server.service import Service
from tinsmith.types import ModelInput, UntypedAPIFuture
from tinsmith.wire.operation_ids import ids_at_front, ids_in

R = TypeVar("R")

MAX_AHEAD = 1000
"""How many numbers may be missing before one that arrives: requests overtake each other, but not
by more than are on their way at a time."""

_SEARCH_IN_THREAD_BYTES = 256 * 1024
_RETRY_AFTER_MS = "1000"


class Recorded(NamedTuple):
    """What the log keeps of a request."""

    request: Any  # of the type that the kind's codec decodes
    body: bytes
    content_type: str


async def refuse_unread(service: Service, caller: Caller, start: bytes, reason: str) -> None:
    """Use up the number of a pass whose body was not taken; `start` is what is known of it."""
    model_id, seq_id = ids_at_front(start) or ("", None)
    if seq_id is not None and seq_id >= 1:
        model = await owned_model(service, caller, model_id)
        if seq_id <= model.queue.highest_seq_id + MAX_AHEAD:
            await service.recorder.refuse(caller.owner, model_id, seq_id, reason)


async def owned_model(service: Service, caller: Caller, model_id: str) -> LiveModel:
    model = await service.models.get(model_id)
    if model is None or model.record.owner != caller.owner:
        raise not_found("model", model_id)
    return model


async def submit(
    service: Service,
    caller: Caller,
    *,
    kind: str | Callable[[R], str],
    body: bytes,
    content_type: str,
    decode: Callable[[], R],
    check: Callable[[R, int], Any] | None = None,
    record: Callable[[LiveModel, R], Awaitable[Recorded]] | None = None,
) -> Response:
    """Decode and check an operation on an existing model, record it, and answer its promise.

    `check` may refuse it (it hears the request and its number) and may be asynchronous; `record`
    says what to record where that differs from what came.
    """
    if len(body) > _SEARCH_IN_THREAD_BYTES:
        model_id, seq_id = await service.workers.run(
            caller.owner, ids_in, body, content_type, service.limits
        )
    else:
        model_id, seq_id = ids_in(body, content_type, service.limits)
    model = await owned_model(service, caller, model_id)
    await _check_session(service, caller, model)
    if seq_id is None or seq_id < 1:
        raise ValidationError("every operation needs a number from 1 on", "seq_id")
    highest = model.queue.highest_seq_id
    if seq_id > highest + MAX_AHEAD:
        problem = f"{seq_id} is {seq_id - highest} above the highest number so far, {highest}"
        raise ValidationError(f"{problem}; at most {MAX_AHEAD} may be skipped", "seq_id")
    if not _is_awaited(model, seq_id):
        _check_room(service, caller, len(body))
    try:
        _check_size(service, len(body))
        if len(body) > LARGE_PASS_BYTES:
            request = await service.workers.run(caller.owner, decode)
        else:
            request = decode()
        name = kind if isinstance(kind, str) else kind(request)
        num_tokens = await _num_tokens(service, model, name, request)
        if check is not None:
            verdict = check(request, seq_id)
            if asyncio.iscoroutine(verdict):
                await verdict
    except (ValidationError, Refusal) as error:
        await service.recorder.refuse(caller.owner, model_id, seq_id, str(error))
        raise
    recorded = Recorded(request, body, content_type)
    if record is not None:
        recorded = await record(model, request)
    request_id = await service.recorder.submit(
        owner=caller.owner,
        kind=name,
        model_id=model_id,
        seq_id=seq_id,
        body=recorded.body,
        content_type=recorded.content_type,
        request=recorded.request,
        num_tokens=num_tokens,
    )
    return answer(UntypedAPIFuture(request_id=request_id, model_id=model_id))


async def _check_session(service: Service, caller: Caller, model: LiveModel) -> None:
    session_id = model.record.session_id
    session = None if session_id is None else await service.sessions.get(session_id, caller.owner)
    if session is None:
        raise ValidationError(f"{model.model_id} is a copy of a checkpoint and cannot be trained")
    if session.state != "active":
        raise ValidationError(session.why_ended)
    service.sessions.touch(session.session_id)


def _is_awaited(model: LiveModel, seq_id: int) -> bool:
    """Whether operations that were let in wait for this one. To keep it out would be to keep them
    waiting, for room that they take up themselves."""
    return len(model.queue) > 0 and seq_id in model.queue.missing(1)


def _check_room(service: Service, caller: Caller, num_bytes: int) -> None:
    """Clients send what is refused here again, with the same number, until there is room."""
    backlog = service.models.backlog_of(caller.owner)
    most_bytes = service.config.key_max_queued_bytes
    most = service.config.key_max_queued_operations
    problem = ""
    if backlog.num_operations >= most:
        problem = f"{backlog.num_operations} requests of this key are waiting; at most {most} may"
    elif backlog.num_bytes and backlog.num_bytes + num_bytes > most_bytes:
        waiting = f"{backlog.num_bytes} bytes of this key's requests are waiting"
        problem = f"{waiting}; at most {most_bytes} may"
    if problem:
        raise Refusal(429, problem, {"retry-after-ms": _RETRY_AFTER_MS})


def _check_size(service: Service, num_bytes: int) -> None:
    limit = service.config.key_max_queued_bytes
    if num_bytes > limit:
        raise TooLargeError(f"the request has {num_bytes} bytes; this key may queue {limit}")


async def _num_tokens(service: Service, model: LiveModel, kind: str, request: Any) -> int:
    """Of a pass; an image that its base model would not read is refused."""
    if not isinstance(KINDS[kind], PassKind):
        return 0
    data, _, _, _ = pass_data(request)
    inputs = [datum.model_input for datum in data]
    if any(map(has_images, inputs)):
        base = await service.base_model(model.record.base_model)
        rules = None if base is None else base.images
        inputs = await service.workers.run(model.owner, _counted, inputs, rules)
    return sum(each.length for each in inputs)


def _counted(inputs: list[ModelInput], rules: ImageRules | None) -> list[ModelInput]:
    return [
        count_images(each, rules, f"data[{index}].model_input") for index, each in enumerate(inputs)
    ]
