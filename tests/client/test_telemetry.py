"""Telemetry: batched, bounded, in the official form, and never in the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.scripted_server import Answer
from tinsmith.client.service import ServiceClient
from tinsmith.client.uplink.tags import request_tags
from tinsmith.client.uplink.telemetry import MAX_QUEUED_EVENTS
from tinsmith.client.uplink.user_errors import is_user_error
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    RequestFailedError,
    TinkerError,
)
from tinsmith.transport.base import Request, Response
from tinsmith.transport.config import Timing
from tinsmith.types import AdamParams, ModelInput, RequestErrorCategory, SamplingParams

REQUEST = Request(method="POST", url="http://x")
CLOSED_AT_ONCE = Timing(telemetry_close_seconds=0.1)
"""What cannot be sent is not waited for when a client is closed."""


def settle(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def events(stub: Any) -> list[dict[str, Any]]:
    return [event for r in stub.seen("/telemetry") for event in r.json()["events"]]


def test_many_events_leave_in_few_requests(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S96: 250 events, three sends of at most 100."""
    service = make_service(telemetry=True)
    telemetry = service.holder.get_telemetry()
    assert telemetry is not None
    for n in range(249):  # and the start of the session
        assert telemetry.log("something", {"n": n})
    service.close("success").result(5)
    sizes = [len(r.json()["events"]) for r in stub.seen("/telemetry")]
    assert sum(sizes) == 251 and max(sizes) <= 100 and len(sizes) == 3
    indices = [event["event_session_index"] for event in events(stub)]
    assert indices == list(range(251))


def test_a_full_queue_drops_and_does_not_block(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S96"""
    stub.on("/api/v1/telemetry", Answer(fault="stall"))
    telemetry = make_service(telemetry=True, timing=CLOSED_AT_ONCE).holder.get_telemetry()
    assert telemetry is not None
    started = time.thread_time()
    kept = [telemetry.log("x") for _ in range(MAX_QUEUED_EVENTS + 1000)]
    assert time.thread_time() - started < 2.0
    assert not kept[-1], "and none waits until there is room, which there never is"


def test_batches_are_what_the_official_client_sends(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S97: the official models accept every batch."""
    tinker = pytest.importorskip("tinker")
    service = make_service(telemetry=True)
    training = service.create_lora_training_client("m")
    stub.on("/api/v1/optim_step", Answer(503), Answer(400, {"detail": "no"}))
    with pytest.raises(TinkerError):
        training.optim_step(AdamParams()).result(5)
    telemetry = service.holder.get_telemetry()
    assert telemetry is not None
    telemetry.log_exception(ZeroDivisionError("x"))
    service.close("success").result(5)
    from tinker.types.telemetry_send_request import TelemetrySendRequest

    for request in stub.seen("/telemetry"):
        TelemetrySendRequest.model_validate(request.json())
    names = [event.get("event_name", event["event"]) for event in events(stub)]
    assert names[0] == "SESSION_START" and names[-1] == "SESSION_END"
    assert "user_error" in names and "UNHANDLED_EXCEPTION" in names
    assert "InternalClientHolder.execute_with_retries.exception" in names
    assert tinker.__version__ == stub.seen("/telemetry")[0].json()["sdk_version"]


@pytest.mark.parametrize(
    "answer",
    [Answer(500), Answer(200, {"status": "no"}), Answer(fault="reset"), Answer(fault="stall")],
)
def test_a_telemetry_endpoint_that_is_down_is_not_noticed(
    stub: Any, make_service: Callable[..., ServiceClient], answer: Answer
) -> None:
    """S98, S99: neither results nor errors are delayed."""
    stub.on("/api/v1/telemetry", answer)
    service = make_service(telemetry=True, timing=CLOSED_AT_ONCE)
    sampler = service.create_sampling_client(base_model="m")
    started = time.monotonic()
    sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)).result(20)
    stub.on("/api/v1/asample", Answer(422, {"detail": "no"}))
    with pytest.raises(APIStatusError):
        sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1)).result(20)
    assert time.monotonic() - started < 5.0, "one question that stalls is given up after five"


@pytest.mark.parametrize(
    ("answer", "is_sent_again"),
    [
        (Answer(503), True),
        (Answer(503, headers={"x-should-retry": "false"}), False),
        (Answer(422, {"detail": "no"}), False),
    ],
)
def test_a_batch_is_sent_again_when_any_other_request_would_be(
    stub: Any,
    make_service: Callable[..., ServiceClient],
    answer: Answer,
    is_sent_again: bool,
) -> None:
    """S98"""
    stub.on("/api/v1/telemetry", answer, Answer(200, {"status": "accepted"}))
    telemetry = make_service(telemetry=True).holder.get_telemetry()
    assert telemetry is not None
    telemetry.log_exception(ZeroDivisionError("x"))
    assert settle(lambda: stub.count("/telemetry") > 0)
    if not is_sent_again:
        telemetry.log_exception(ZeroDivisionError("another"))
    assert settle(lambda: stub.count("/telemetry") > 1)
    first, second = (request.json() for request in stub.seen("/telemetry")[:2])
    assert (first == second) is is_sent_again


def test_the_off_switch(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S101"""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ServiceClient(base_url=stub.url, api_key="tml-x") as service:
        service.create_sampling_client(base_model="m")
        assert service.get_telemetry() is None
    assert stub.count("/telemetry") == 0


def test_tags_travel_with_the_call(stub: Any, make_service: Callable[..., ServiceClient]) -> None:
    """S102: from the caller's thread or task to events of the I/O thread."""
    service = make_service(telemetry=True)
    training = service.create_lora_training_client("m")
    stub.on("/api/v1/optim_step", Answer(400, {"detail": "no"}))

    async def in_a_task() -> None:
        with request_tags(experiment="b", step="2"), pytest.raises(TinkerError):
            await training.optim_step(AdamParams())

    with request_tags(experiment="a"), pytest.raises(TinkerError):
        training.optim_step(AdamParams()).result(5)
    asyncio.run(in_a_task())
    service.close("success").result(5)
    tags = [
        e["event_data"].get("tags") for e in events(stub) if e.get("event_name") == "user_error"
    ]
    assert tags == [{"experiment": "a"}, {"experiment": "b", "step": "2"}]


def status(code: int) -> APIStatusError:
    return APIStatusError(
        "x", Response(status_code=code, headers={}, content=b"", request=REQUEST), None
    )


def chained(inner: BaseException, *, by_cause: bool) -> Exception:
    try:
        try:
            raise inner
        except BaseException as error:
            if by_cause:
                raise RuntimeError("outer") from error
            raise RuntimeError("outer")  # noqa: B904
    except RuntimeError as outer:
        return outer


MATRIX: list[tuple[BaseException, bool]] = [
    *[
        (status(code), 400 <= code < 500 and code != 408)
        for code in (400, 401, 402, 403, 404, 408, 409, 410, 422, 429, 500, 503)
    ],
    (APIConnectionError(REQUEST), False),
    (APITimeoutError(REQUEST), False),
    (RequestFailedError("x", "r", RequestErrorCategory.User), True),
    (RequestFailedError("x", "r", RequestErrorCategory.Server), False),
    (RequestFailedError("x", "r", RequestErrorCategory.Unknown), False),
    (ValueError("x"), False),
    (chained(status(400), by_cause=True), True),
    (chained(status(400), by_cause=False), True),
    (chained(status(500), by_cause=True), False),
]


@pytest.mark.parametrize(("error", "expected"), MATRIX)
def test_whose_fault_it_is(error: BaseException, expected: bool) -> None:
    """S52, S103: the written matrix, with causes."""
    assert is_user_error(error) is expected


@pytest.mark.parametrize("code", range(399, 505))
def test_the_rule_is_the_official_one(code: int) -> None:
    """S52"""
    official = pytest.importorskip("tinker.lib.telemetry")
    assert is_user_error(status(code)) == official.is_user_error(status(code))


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert not is_user_error(one)
