"""Sessions: a client's stay at the service, from its first operation to its end."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from tinsmith.errors import ValidationError
from tinsmith.types.convert import Bounds, Tagged
from tinsmith.types.model import Request, Response

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class CreateSessionRequest(Request):
    tags: list[str]
    user_metadata: dict[str, Any] | None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Response):
    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Request):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Response):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class ClientSessionFinishSuccess(Response):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(Response):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(Response):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Tagged("type"),
]


class FinishSessionRequest(Request):
    """The client is done. `detail` is sent as null when there is none."""

    __explicit_null__ = frozenset({"detail"})

    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(Response):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Response):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Response):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason = Annotated[
    SessionFailedRequestReason
    | SessionFailedTrainingRunReason
    | SessionFailedSamplingSessionReason,
    Tagged("type"),
]


class SessionFailed(Response):
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class SessionCancelled(Response):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(Response):
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(Response):
    type: Literal["active"] = "active"


SessionStatus = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive, Tagged("type")
]


class GetSessionResponse(Response):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Response):
    sessions: list[str]


class AssignSessionProjectRequest(Request):
    project_id: str


class TraceExportResponse(Response):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class OwnSearchOwner(Request):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(Request):
    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Request):
    type: Literal["user"] = "user"
    owner_urns: Annotated[list[str], Bounds(min_length=1, max_length=10)]


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Tagged("type")]


class ActiveSessionStatusQuery(Request):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Request):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Request):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Request):
    type: Literal["client_finished"] = "client_finished"
    reasons: Annotated[list[ClientSessionFinishReasonType] | None, Bounds(min_length=1)] = None


SessionStatusQuery = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Tagged("type"),
]


class SessionSearchCursor(Response):
    last_created_at: datetime
    last_session_id: str

    def _check(self) -> None:
        if self.last_created_at.tzinfo is None:
            raise ValidationError("needs a time zone", "last_created_at")


class SessionSearchRequest(Request):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str | None, Bounds(min_length=1)] = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[SessionStatusQuery] | None, Bounds(min_length=1)] = None
    limit: Annotated[int, Bounds(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


class SessionSummary(Response):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Response):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
