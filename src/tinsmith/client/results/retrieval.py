"""Fetching a promised result: long-poll the service until it is there.

A request that was accepted ends in one of three ways: a result, a failure that the service reports
(`RequestFailedError`), or a result that the service no longer has (`RetryableException`).
Everything in between (not yet, connections that break, a service that restarts) is waited out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinsmith.client.results import queue_state
from tinsmith.client.uplink.api import decode, invalid_answer
from tinsmith.errors import (
    APIResponseValidationError,
    APIStatusError,
    RequestFailedError,
    RetryableException,
    ValidationError,
)
from tinsmith.transport.base import Response
from tinsmith.transport.retry import NO_RETRY
from tinsmith.types import (
    ForwardBackwardOutput,
    FutureFinished,
    FutureRetrieveRequest,
    MetadataOnlyResponse,
    RequestFailedResponse,
    SampleResponse,
    UntypedAPIFuture,
)
from tinsmith.types.protocol import PROTOBUF
from tinsmith.wire import endpoints, proto

if TYPE_CHECKING:
    from tinsmith.client.results.poller import CompletionPoller
    from tinsmith.client.uplink.uplink import Uplink

T = TypeVar("T")

POLL_TIMEOUT_SECONDS = 45.0
"""Services hold a request for about 30 s."""

_ROUNDTRIP = "X-Tinker-Create-Promise-Roundtrip-Time"
_UNHELD_SECONDS = 0.05
"""A "not yet" that comes quicker than this was not held, and is not asked for again at once."""


@dataclass(frozen=True, slots=True)
class ResultKind(Generic[T]):
    """How a result travels and is read."""

    request_type: str
    read: Callable[[Response], T]
    is_protobuf: bool = False


def json_kind(request_type: str, kind: type[T]) -> ResultKind[T]:
    return ResultKind(request_type, lambda response: decode(kind, response))


def pass_kind(*, forward_only: bool) -> ResultKind[ForwardBackwardOutput]:
    return ResultKind(
        "Forward" if forward_only else "ForwardBackward",
        lambda response: _read_either(
            response, "ForwardBackwardOutput", proto.decode_output, ForwardBackwardOutput
        ),
        is_protobuf=True,
    )


def sample_kind(promise: UntypedAPIFuture) -> ResultKind[SampleResponse]:
    """The ids of the sequences come with the promise, not with the result."""

    def read(response: Response) -> SampleResponse:
        ids = promise.sample_sequence_ids
        if ids is None:
            raise APIResponseValidationError(
                response, None, "the service promised a sample without sample_sequence_ids"
            )
        return _read_either(
            response, "SampleResponse", lambda body: proto.decode_sample(body, ids), SampleResponse
        )

    return ResultKind("Sample", read, is_protobuf=True)


async def retrieve(
    uplink: Uplink,
    promise: UntypedAPIFuture,
    kind: ResultKind[T],
    *,
    roundtrip_seconds: float,
    observer: queue_state.QueueStateObserver | None = None,
    poller: CompletionPoller | None = None,
) -> T:
    """The result of an accepted request.

    `roundtrip_seconds` is how long accepting took; the service is told. With a
    `poller`, nothing is asked before that has seen the request finish.
    """
    asking = _Asking(uplink, promise, kind.request_type, roundtrip_seconds)
    if kind.is_protobuf:
        asking.headers["Accept"] = PROTOBUF
    async with contextlib.AsyncExitStack() as held:
        if poller is not None:
            completion = await poller.wait_for(promise.request_id)
            if isinstance(completion, FutureFinished) and (
                size := completion.response_payload_uncompressed_size
            ):
                await asking.make_room(size, held)
        while True:
            asked = time.monotonic()
            response, answer = await asking.ask()
            if answer is None or "error" in answer:
                if poller is not None:
                    poller.mark_retrieved(promise.request_id)
                if answer is not None:
                    raise _failure(answer, promise.request_id, kind.request_type)
                return kind.read(response)
            if answer.get("status") == "complete_metadata":
                announced = decode(MetadataOnlyResponse, response)
                await asking.make_room(announced.response_payload_size, held)
                continue
            queue_state.tell(observer, answer)
            await asking.pause_unless_held(time.monotonic() - asked)


class _Asking:
    """The polls for one result."""

    def __init__(
        self, uplink: Uplink, promise: UntypedAPIFuture, request_type: str, roundtrip_seconds: float
    ) -> None:
        self._uplink = uplink
        self._request_id = promise.request_id
        self.headers = {
            "X-Tinker-Request-Type": request_type,
            "X-Stainless-Raw-Response": "raw",
            _ROUNDTRIP: f"{roundtrip_seconds:.6f}",
        }
        self._allow_metadata_only = True
        self._iteration = 0
        self._unheld = 0

    async def ask(self) -> tuple[Response, dict[str, Any] | None]:
        """A response, and what it says if it is not the result itself. Failures that do not mean
        anything about the request are waited out here."""
        policy = self._uplink.config.timing.polling
        return await self._uplink.api.repeater.run(lambda _: self._ask_once(), policy)

    async def _ask_once(self) -> tuple[Response, dict[str, Any] | None]:
        try:
            response = await self._send()
        except APIStatusError as error:
            if error.status_code == 408:
                return error.response, _not_yet(error)
            if error.status_code == 410:
                raise RetryableException(
                    f"the service no longer has the result of request {self._request_id}; "
                    "send the request again"
                ) from error
            raise
        return response, _not_a_result(response)

    async def _send(self) -> Response:
        headers = {**self.headers, "X-Tinker-Request-Iteration": str(self._iteration)}
        self.headers.pop(_ROUNDTRIP, None)  # told once
        self._iteration += 1
        return await self._uplink.api.send(
            endpoints.RETRIEVE_FUTURE,
            FutureRetrieveRequest(
                request_id=self._request_id, allow_metadata_only=self._allow_metadata_only
            ),
            headers=headers,
            timeout_seconds=POLL_TIMEOUT_SECONDS,
            retry=NO_RETRY,
        )

    async def make_room(self, num_bytes: int, held: contextlib.AsyncExitStack) -> None:
        """Reserve room for a result of that size; then it is asked for itself."""
        await held.enter_async_context(self._uplink.response_budget.hold(num_bytes))
        self._allow_metadata_only = False

    async def pause_unless_held(self, seconds: float) -> None:
        """A service holds a poll until there is news. One that does not is asked less often."""
        self._unheld = self._unheld + 1 if seconds < _UNHELD_SECONDS else 0
        if self._unheld:
            await asyncio.sleep(min(0.01 * 2.0 ** min(self._unheld, 10), 1.0))


def _not_yet(error: APIStatusError) -> dict[str, Any]:
    """What a 408 says about the queue; one from a proxy says nothing, whatever its body."""
    body = error.body if isinstance(error.body, dict) else {}
    told = {name: body[name] for name in ("queue_state", "queue_state_reason") if name in body}
    return {"type": "try_again", **told}


def _not_a_result(response: Response) -> dict[str, Any] | None:
    """The answer, if it is one that comes in place of a result: not yet, failed, or a size."""
    if PROTOBUF in response.headers.get("content-type", ""):
        return None
    # Only a small object can be one of them; a large result is not parsed twice.
    if len(response.content) > 65_536:
        return None
    try:
        answer = response.json()
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    is_other = (
        answer.get("type") == "try_again"
        or answer.get("status") == "complete_metadata"
        or "error" in answer
    )
    return answer if is_other else None


def _failure(answer: dict[str, Any], request_id: str, request_type: str) -> RequestFailedError:
    failed = RequestFailedResponse(
        error=str(answer["error"]), category=answer.get("category", "unknown")
    )
    return RequestFailedError(
        f"{request_type} failed: {failed.error} (request {request_id})",
        request_id=request_id,
        category=failed.category,
    )


def _read_either(response: Response, name: str, from_protobuf: Callable[[bytes], T], cls: Any) -> T:
    try:
        if PROTOBUF in response.headers.get("content-type", ""):
            return from_protobuf(response.content)
        value: T = cls.model_validate(response.json())
        return value
    except ValidationError as error:
        raise invalid_answer(response, name, error) from error
    except ValueError as error:
        problem = ValidationError(f"neither protobuf nor JSON ({error})")
        raise invalid_answer(response, name, problem) from error
