"""Sessions: begin, signs of life, end; and looking at them afterwards."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from tinsmith.errors import ValidationError
from tinsmith.server.edge.auth import Caller
from tinsmith.server.edge.http import (
    Refusal,
    answer,
    check_signature,
    not_found,
    nothing,
    open_route,
    query_int,
    read_body,
    route,
    signed_url,
)
from tinsmith.server.service import Service
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
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatusQuery,
    SessionSummary,
    TraceExportResponse,
)
from tinsmith.wire import dialects

DEFAULT_PROJECT = "default"


async def create_session(service: Service, caller: Caller, request: Request) -> Response:
    body = await read_body(service, request)
    message = dialects.decode(CreateSessionRequest, body, service.limits)
    session = await service.sessions.create(caller.owner, message)
    return answer(CreateSessionResponse(session_id=session.session_id))


async def session_heartbeat(service: Service, caller: Caller, request: Request) -> Response:
    body = await read_body(service, request)
    message = dialects.decode(SessionHeartbeatRequest, body, service.limits)
    session = await owned_session(service, caller, message.session_id)
    if session.state != "active":
        raise Refusal(410, "the session is finished")
    service.sessions.touch(session.session_id)
    return answer(SessionHeartbeatResponse())


async def finish_session(service: Service, caller: Caller, request: Request) -> Response:
    session = await owned_session(service, caller, request.path_params["session_id"])
    body = await read_body(service, request)
    message = dialects.decode(FinishSessionRequest, body, service.limits)
    await service.sessions.finish(session, message.reason.type, message.detail)
    service.scheduler.wake_all()
    return nothing()


async def list_sessions(service: Service, caller: Caller, request: Request) -> Response:
    page = await service.store.sessions.page_of_owner(
        caller.owner,
        query_int(request, "limit", 20, most=1000),
        query_int(request, "offset", 0, most=2**53),
    )
    return answer(ListSessionsResponse(sessions=[s.session_id for s in page.items]))


async def get_session(service: Service, caller: Caller, request: Request) -> Response:
    session = await owned_session(service, caller, request.path_params["session_id"])
    models = await service.store.models.of_session(session.session_id)
    samplers = await service.store.samplers.of_session(session.session_id)
    return answer(
        GetSessionResponse(
            training_run_ids=[m.model_id for m in models],
            sampler_ids=[s.sampler_id for s in samplers],
            user_metadata=_texts(session.user_metadata),
            display_name=session.display_name,
        )
    )


async def assign_project(service: Service, caller: Caller, request: Request) -> Response:
    session = await owned_session(service, caller, request.path_params["session_id"])
    body = await read_body(service, request)
    message = dialects.decode(AssignSessionProjectRequest, body, service.limits)
    await service.sessions.set(session, {"project_id": message.project_id})
    for model in await service.store.models.of_session(session.session_id):
        await service.store.models.update(model.model_id, {"project_id": message.project_id})
    return nothing()


async def trace_export(service: Service, caller: Caller, request: Request) -> Response:
    """Where the session's operations can be fetched as a trace for a browser's viewer."""
    session = await owned_session(service, caller, request.path_params["session_id"])
    expires = int(time.time()) + service.config.signed_url_seconds
    url = signed_url(service, f"/traces/{session.session_id}.json", expires)
    return answer(TraceExportResponse(status="ready", url=url))


async def get_trace(service: Service, request: Request) -> Response:
    """A session's trace, for whoever has a signed URL."""
    check_signature(service, request)
    return answer(await session_trace(service.store, request.path_params["session_id"]))


async def search_sessions(service: Service, caller: Caller, request: Request) -> Response:
    body = await read_body(service, request)
    query = dialects.decode(SessionSearchRequest, body, service.limits)
    owner = query.owner
    if not isinstance(owner, OwnSearchOwner | AccessibleSearchOwner):
        visible = caller.user_urn in owner.owner_urns
    else:
        visible = True
    found = await service.store.sessions.of_owner(caller.owner) if visible else []
    matching = [s for s in found if _matches(s, query)]
    page = matching[: query.limit]
    summaries = [await _summary(service, caller, s) for s in page]
    cursor = None
    if len(matching) > len(page):
        cursor = SessionSearchCursor(
            last_created_at=_moment(page[-1].created_at), last_session_id=page[-1].session_id
        )
    return answer(SessionSearchResponse(sessions=summaries, next_cursor=cursor))


async def owned_session(service: Service, caller: Caller, session_id: str) -> SessionRecord:
    session = await service.sessions.get(session_id, caller.owner)
    if session is None:
        raise not_found("session", session_id)
    return session


async def active_session(service: Service, caller: Caller, session_id: str) -> SessionRecord:
    """A session in which something new may begin."""
    session = await owned_session(service, caller, session_id)
    if session.state != "active":
        raise ValidationError(f"session {session_id} is finished; start another")
    service.sessions.touch(session_id)
    return session


def _matches(session: SessionRecord, query: SessionSearchRequest) -> bool:
    if query.cursor is not None:
        last = (query.cursor.last_created_at, query.cursor.last_session_id)
        if (_moment(session.created_at), session.session_id) >= last:
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
    return status.type == "active" and session.state == "active"


async def _summary(service: Service, caller: Caller, session: SessionRecord) -> SessionSummary:
    checkpoints = [
        checkpoint
        for model in await service.store.models.of_session(session.session_id)
        for checkpoint in await service.store.checkpoints.of_model(model.model_id)
    ]
    return SessionSummary(
        session_id=session.session_id,
        created_at=_moment(session.created_at),
        owner=caller.user_urn,
        project_id=_project(session),
        status=(
            SessionActive()
            if session.state == "active"
            else ClientSessionFinished.model_validate(
                {"reason": {"type": session.finish_reason}, "detail": session.finish_detail}
            )
        ),
        checkpoints_count=len(checkpoints),
        display_name=session.display_name,
        user_metadata=_texts(session.user_metadata),
        checkpoint_storage_bytes=sum(c.size_bytes for c in checkpoints),
    )


def _project(session: SessionRecord) -> str:
    return session.project_id or DEFAULT_PROJECT


def _texts(metadata: dict[str, object] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    return {k: v if isinstance(v, str) else str(v) for k, v in metadata.items()}


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


ROUTES = [
    route(
        "POST",
        "/create_session",
        create_session,
        takes=CreateSessionRequest,
        gives=CreateSessionResponse,
    ),
    route(
        "POST",
        "/session_heartbeat",
        session_heartbeat,
        takes=SessionHeartbeatRequest,
        gives=SessionHeartbeatResponse,
    ),
    route(
        "POST",
        "/sessions/search",
        search_sessions,
        takes=SessionSearchRequest,
        gives=SessionSearchResponse,
    ),
    route("GET", "/sessions", list_sessions, gives=ListSessionsResponse),
    route("POST", "/sessions/{session_id}/finish", finish_session, takes=FinishSessionRequest),
    route(
        "PUT", "/sessions/{session_id}/project", assign_project, takes=AssignSessionProjectRequest
    ),
    route("GET", "/sessions/{session_id}/trace_export", trace_export, gives=TraceExportResponse),
    route("GET", "/sessions/{session_id}", get_session, gives=GetSessionResponse),
    open_route("GET", "/traces/{session_id}.json", get_trace),
]
