"""Sessions: begin, signs of life, end; and looking at them afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinsmith.errors import ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import (
    Refusal,
    check_signature,
    moment,
    not_found,
    query_int,
    signed_url,
)
from tinsmith.server.edge.routing import bare_route, open_route, route
from tinsmith.server.metadata import size_of
from tinsmith.server.service import Service
from tinsmith.server.store.errors import OverQuotaError
from tinsmith.server.store.records import SessionRecord
from tinsmith.server.traces import session_trace
from tinsmith.types import (
    AccessibleSearchOwner,
    AssignSessionProjectRequest,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    GetSessionResponse,
    ListSessionsResponse,
    OwnSearchOwner,
    SessionActive,
    SessionCancelled,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
    TraceExportResponse,
)
from tinsmith.types.protocol import JSON
from tinsmith.wire import endpoints

DEFAULT_PROJECT = "default"
_SEARCHED_TOGETHER = 200


async def create_session(
    service: Service, caller: Caller, request: Request, message: CreateSessionRequest
) -> CreateSessionResponse:
    with _within_quota():
        session = await service.sessions.create(caller.owner, message)
    service.events.changed(caller.owner, "session", {"session": session.session_id})
    return CreateSessionResponse(session_id=session.session_id)


async def session_heartbeat(
    service: Service, caller: Caller, request: Request, message: SessionHeartbeatRequest
) -> SessionHeartbeatResponse:
    session = await owned_session(service, caller, message.session_id)
    if session.state != "active":
        raise Refusal(410, session.why_ended)
    service.sessions.touch(session.session_id)
    return SessionHeartbeatResponse()


async def finish_session(
    service: Service, caller: Caller, request: Request, message: FinishSessionRequest
) -> None:
    session = await owned_session(service, caller, request.path_params["session_id"])
    await service.sessions.finish(session, message.reason.type, message.detail)
    service.events.changed(caller.owner, "session", {"session": session.session_id})
    service.scheduler.wake_all()


async def list_sessions(service: Service, caller: Caller, request: Request) -> ListSessionsResponse:
    page = await service.store.sessions.page_of_owner(
        caller.owner,
        query_int(request, "limit", 20, most=1000),
        query_int(request, "offset", 0, most=2**53),
    )
    return ListSessionsResponse(sessions=[s.session_id for s in page.items])


async def get_session(service: Service, caller: Caller, request: Request) -> GetSessionResponse:
    session = await owned_session(service, caller, request.path_params["session_id"])
    models = await service.store.models.of_session(session.session_id)
    samplers = await service.store.samplers.of_session(session.session_id)
    return GetSessionResponse(
        training_run_ids=[m.model_id for m in models],
        sampler_ids=[s.sampler_id for s in samplers],
        user_metadata=_texts(session.user_metadata),
        display_name=session.display_name,
    )


async def assign_project(
    service: Service, caller: Caller, request: Request, message: AssignSessionProjectRequest
) -> None:
    session = await owned_session(service, caller, request.path_params["session_id"])
    models = await service.store.models.of_session(session.session_id)
    num_bytes = len(models) * size_of(message.project_id)
    with _within_quota():
        async with service.metadata.taken(caller.owner, num_bytes):
            await service.sessions.set(session, {"project_id": message.project_id})
            for model in models:
                values = {"project_id": message.project_id}
                await service.store.models.update(model.model_id, values)


async def trace_export(service: Service, caller: Caller, request: Request) -> TraceExportResponse:
    """Where the session's operations can be fetched as a trace for a browser's viewer."""
    session = await owned_session(service, caller, request.path_params["session_id"])
    expires = int(time.time()) + service.config.signed_url_seconds
    url = signed_url(service, f"/traces/{session.session_id}.json", expires)
    return TraceExportResponse(status="ready", url=url)


async def get_trace(service: Service, request: Request) -> Response:
    """A session's trace, for whoever has a signed URL."""
    check_signature(service, request)
    trace = session_trace(service.store, request.path_params["session_id"])
    return StreamingResponse(trace, media_type=JSON)


async def search_sessions(
    service: Service, caller: Caller, request: Request, query: SessionSearchRequest
) -> SessionSearchResponse:
    owner = query.owner
    if not isinstance(owner, OwnSearchOwner | AccessibleSearchOwner):
        visible = caller.user_urn in owner.owner_urns
    else:
        visible = True
    matching = await _found(service, caller, query) if visible else []
    page = matching[: query.limit]
    summaries = [await _summary(service, caller, s) for s in page]
    cursor = None
    if len(matching) > len(page):
        cursor = SessionSearchCursor(
            last_created_at=moment(page[-1].created_at), last_session_id=page[-1].session_id
        )
    return SessionSearchResponse(sessions=summaries, next_cursor=cursor)


async def _found(
    service: Service, caller: Caller, query: SessionSearchRequest
) -> list[SessionRecord]:
    """The newest that match, one more than are asked for. Looked for a few at a time: an owner may
    have any number of them, and each holds what its client gave it."""
    matching: list[SessionRecord] = []
    last: SessionRecord | None = None
    while len(matching) <= query.limit:
        some = await service.store.sessions.older(caller.owner, last, _SEARCHED_TOGETHER)
        matching += [session for session in some if _matches(session, query)]
        if len(some) < _SEARCHED_TOGETHER:
            break
        last = some[-1]
    return matching


async def owned_session(service: Service, caller: Caller, session_id: str) -> SessionRecord:
    session = await service.sessions.get(session_id, caller.owner)
    if session is None:
        raise not_found("session", session_id)
    return session


async def active_session(service: Service, caller: Caller, session_id: str) -> SessionRecord:
    """A session in which something new may begin."""
    session = await owned_session(service, caller, session_id)
    if session.state != "active":
        raise ValidationError(session.why_ended)
    service.sessions.touch(session_id)
    return session


@contextmanager
def _within_quota() -> Iterator[None]:
    try:
        yield
    except OverQuotaError as error:
        raise Refusal(403, str(error)) from None


def _matches(session: SessionRecord, query: SessionSearchRequest) -> bool:
    if query.cursor is not None:
        last = (query.cursor.last_created_at, query.cursor.last_session_id)
        if (moment(session.created_at), session.session_id) >= last:
            return False
    if query.project_ids is not None and _project(session) not in query.project_ids:
        return False
    wanted = query.user_metadata.items()
    if not all(str(session.user_metadata.get(k)) == v for k, v in wanted):
        return False
    if query.statuses is not None and not any(_has_status(session, s) for s in query.statuses):
        return False
    if query.session_id is None and query.display_name is None:
        return True
    if query.session_id is not None and session.session_id == query.session_id:
        return True
    words = (query.display_name or "").lower().split()
    name = (session.display_name or "").lower()
    return bool(words) and all(word in name for word in words)


def _has_status(session: SessionRecord, status: SessionStatusQuery) -> bool:
    if isinstance(status, ClientFinishedSessionStatusQuery):
        is_wanted = status.reasons is None or session.finish_reason in status.reasons
        return session.state == "finished" and is_wanted
    return status.type == session.state


def _status(session: SessionRecord) -> SessionStatus:
    if session.state == "active":
        return SessionActive()
    if session.state == "cancelled":
        return SessionCancelled(detail=session.finish_detail)
    return ClientSessionFinished.model_validate(
        {"reason": {"type": session.finish_reason}, "detail": session.finish_detail}
    )


async def _summary(service: Service, caller: Caller, session: SessionRecord) -> SessionSummary:
    count, size = await service.store.checkpoints.storage_of_session(session.session_id)
    return SessionSummary(
        session_id=session.session_id,
        created_at=moment(session.created_at),
        owner=caller.user_urn,
        project_id=_project(session),
        status=_status(session),
        checkpoints_count=count,
        display_name=session.display_name,
        user_metadata=_texts(session.user_metadata),
        checkpoint_storage_bytes=size,
    )


def _project(session: SessionRecord) -> str:
    return session.project_id or DEFAULT_PROJECT


def _texts(metadata: dict[str, object] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    return {k: v if isinstance(v, str) else str(v) for k, v in metadata.items()}


ROUTES = [
    route(endpoints.CREATE_SESSION, create_session),
    route(endpoints.SESSION_HEARTBEAT, session_heartbeat),
    route(endpoints.SEARCH_SESSIONS, search_sessions),
    bare_route(endpoints.LIST_SESSIONS, list_sessions),
    route(endpoints.FINISH_SESSION, finish_session),
    route(endpoints.ASSIGN_PROJECT, assign_project),
    bare_route(endpoints.TRACE_EXPORT, trace_export),
    bare_route(endpoints.GET_SESSION, get_session),
    open_route(endpoints.GET_TRACE, get_trace),
]
