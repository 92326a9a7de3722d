"""Fetching promised results: every answer the service may give while one waits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.results import queue_state
from tinsmith.client.results.queue_state import QueueState, QueueStateLogger
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    APIResponseValidationError,
    APIStatusError,
    BadRequestError,
    BillingError,
    NotFoundError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)
from tinsmith.transport.config import Timing
from tinsmith.transport.retry import POLLING
from tinsmith.types import AdamParams, Datum, ModelInput, RequestErrorCategory

RETRIEVE = "/api/v1/retrieve_future"
DONE = Answer(200, {"metrics": {"x": 1.0}})
NOT_YET = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}


QUICK = Timing(
    polling=dataclasses.replace(POLLING, initial_delay_seconds=0.001, max_delay_seconds=0.002)
)


@pytest.fixture
def service(make_service: Callable[..., ServiceClient]) -> ServiceClient:
    return make_service(timing=QUICK)


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("m")


@pytest.mark.parametrize(
    ("script", "polls"),
    [
        ([DONE], 1),
        ([Answer(200, NOT_YET), DONE], 2),
        ([Answer(408, NOT_YET), Answer(408, b""), DONE], 3),
        ([Answer(500), Answer(502, b"<html>"), DONE], 3),
        ([Answer(429, headers={"retry-after-ms": "2"}), DONE], 2),
        ([Answer(fault="reset"), Answer(fault="truncate"), DONE], 3),
        ([Answer(400, {"detail": "?"})] * 3 + [DONE], 4),
        ([Answer(400, b"")] * 5 + [DONE], 6),
        ([Answer(408, {"error": "gateway timeout"}), DONE], 2),
        ([Answer(200, {"status": "complete_metadata", "response_payload_size": 10}), DONE], 2),
        ([Answer(200, {"status": "complete_metadata", "response_payload_size": 0}), DONE], 2),
    ],
)
def test_whatever_is_not_final_is_waited_out(
    stub: Any, training: TrainingClient, script: list[Answer], polls: int
) -> None:
    """S46, S51, S71: the number of polls each answer costs."""
    stub.on(RETRIEVE, *script)
    before = stub.count("/retrieve_future")
    assert training.optim_step(AdamParams()).result(10).metrics == {"x": 1.0}
    seen = stub.seen("/retrieve_future")[before:]
    assert len(seen) == polls
    assert [r.headers["x-tinker-request-iteration"] for r in seen] == [str(n) for n in range(polls)]
    assert "x-tinker-create-promise-roundtrip-time" in seen[0].headers
    assert all("x-tinker-create-promise-roundtrip-time" not in r.headers for r in seen[1:])


@pytest.mark.parametrize(
    ("answer", "polls", "error"),
    [
        (Answer(404, {"detail": "who?"}), 1, NotFoundError),
        (Answer(403), 1, APIStatusError),
        (Answer(401), 1, APIStatusError),
        (Answer(422), 1, APIStatusError),
        (Answer(400, {"detail": "?"}), 4, BadRequestError),
        (Answer(410), 1, RetryableException),
        (Answer(200, {"error": "boom", "category": "server"}), 1, RequestFailedError),
        (Answer(200, {"metrics": 3}), 1, APIResponseValidationError),
        (Answer(200, b"\xff\xfe"), 1, APIResponseValidationError),
    ],
)
def test_what_is_final_is_an_error_of_ours(
    stub: Any, training: TrainingClient, answer: Answer, polls: int, error: type[Exception]
) -> None:
    """S40, S44, S46: typed, and all of one family."""
    stub.on(RETRIEVE, answer)
    before = stub.count("/retrieve_future")
    with pytest.raises(error) as caught:
        training.optim_step(AdamParams()).result(10)
    assert isinstance(caught.value, TinkerError)
    assert stub.count("/retrieve_future") - before == polls


@pytest.mark.parametrize(
    ("word", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("User", RequestErrorCategory.User),
        ("server", RequestErrorCategory.Server),
        ("weather", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
    ],
)
def test_a_failure_carries_its_category(
    stub: Any, training: TrainingClient, word: str | None, category: RequestErrorCategory
) -> None:
    """S19"""
    body: dict[str, Any] = {"error": "boom"}
    if word is not None:
        body["category"] = word
    stub.on(RETRIEVE, Answer(200, body))
    with pytest.raises(RequestFailedError, match="boom") as caught:
        training.optim_step(AdamParams()).result(5)
    assert caught.value.category is category
    assert caught.value.request_id == "r2"


def test_a_large_result_is_announced_and_then_fetched(stub: Any, training: TrainingClient) -> None:
    stub.on(
        RETRIEVE,
        Answer(200, {"status": "complete_metadata", "response_payload_size": 1 << 30}),
        DONE,
    )
    training.optim_step(AdamParams()).result(5)
    first, second = (r.json() for r in stub.seen("/retrieve_future")[-2:])
    assert first["allow_metadata_only"] is True and second["allow_metadata_only"] is False


def test_results_as_json_are_read_too(stub: Any, training: TrainingClient) -> None:
    """A service that has no protobuf answers what older clients read."""
    stub.on(
        RETRIEVE,
        Answer(
            200,
            {
                "loss_fn_output_type": "ArrayRecord",
                "loss_fn_outputs": [
                    {"logprobs": {"data": [-1.0], "dtype": "float32", "shape": [1]}}
                ],
                "metrics": {"loss:sum": 2.0},
            },
        ),
    )
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})
    output = training.forward_backward([datum], "cross_entropy").result(5)
    assert output.metrics == {"loss:sum": 2.0}
    assert stub.seen("/retrieve_future")[-1].headers["accept"] == "application/x-protobuf"


def test_garbage_in_place_of_protobuf_is_explained(stub: Any, training: TrainingClient) -> None:
    stub.on(RETRIEVE, Answer(200, b"\xff\xff\xff", {"content-type": "application/x-protobuf"}))
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})
    with pytest.raises(APIResponseValidationError, match="ForwardBackwardOutput"):
        training.forward_backward([datum], "cross_entropy").result(5)


def test_a_paused_queue_is_told_with_its_reason_once_a_minute(
    stub: Any, training: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    """S71, S100"""
    waiting = {**NOT_YET, "queue_state_reason": "moving house"}
    stub.on(RETRIEVE, Answer(200, waiting), Answer(408, waiting), Answer(200, waiting), DONE)
    with caplog.at_level(logging.WARNING):
        training.optim_step(AdamParams()).result(10)
    assert caplog.text.count("moving house") == 1


def test_an_observer_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Rude(QueueStateLogger):
        def on_queue_state_change(self, queue_state: QueueState, reason: str | None) -> None:
            raise ZeroDivisionError

    queue_state.tell(Rude("x", "y"), {"queue_state": "weird", "queue_state_reason": "z"})
    assert "on_queue_state_change failed" in caplog.text
    assert QueueState("weird") is QueueState.UNKNOWN


def test_a_402_while_polling_ends_when_the_pause_does(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    stub.flags = {"billing_exception_max_pause_duration_sec": 0}
    training = make_service().create_lora_training_client("m")
    stub.on(RETRIEVE, Answer(402, {"detail": "pay"}))
    with pytest.raises(BillingError):
        training.optim_step(AdamParams()).result(5)


def test_a_server_that_does_not_hold_is_not_hammered(stub: Any, training: TrainingClient) -> None:
    """Answers that come at once are asked for with growing pauses."""
    arrived: list[float] = []

    def play(request: Recorded) -> Answer:
        arrived.append(request.arrived)
        return Answer(200, NOT_YET) if len(arrived) < 6 else DONE

    stub.on(RETRIEVE, play)
    training.optim_step(AdamParams()).result(10)
    gaps = [later - earlier for earlier, later in pairwise(arrived)]
    assert gaps[-1] > gaps[0] and sum(gaps) > 0.3
