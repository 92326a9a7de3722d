"""Promises: the handle that answers a slow request at once, and how its result is fetched."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from tinsmith.types.convert import Tagged
from tinsmith.types.model import Request, Response

RequestID = str


class RequestErrorCategory(StrEnum):
    """Whose fault a failure is. Words are read in upper or lower case; one that is not known reads
    as `Unknown`."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        lowered = value.lower() if isinstance(value, str) else ""
        return next((member for member in cls if member.value == lowered), cls.Unknown)


class UntypedAPIFuture(Response):
    request_id: RequestID
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    """For sampling: the ids of the sequences to come, one per sample."""


class FutureRetrieveRequest(Request):
    request_id: RequestID
    allow_metadata_only: bool = False
    """Whether a large result may first be announced by its size."""


class TryAgainResponse(Response):
    """Not yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]
    queue_state_reason: str | None = None


class MetadataOnlyResponse(Response):
    """The result is there, and this large."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class RequestFailedResponse(Response):
    """The request was accepted and then failed, for good."""

    error: str
    category: RequestErrorCategory


class SamplingSessionFuturesTarget(Request):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


class FuturesRetrieveRequest(Request):
    """Wait for any of a sampler's requests to finish."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class FutureFinished(Response):
    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Response):
    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion = Annotated[FutureFinished | FutureFailed, Tagged("state")]


class FuturesRetrieveResponse(Response):
    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(Request):
    request_id: RequestID


FutureRetrieveResponse = Any
"""What `retrieve_future` may answer: any result type, or one of the answers above."""
