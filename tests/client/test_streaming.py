"""Samples token by token."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    NotFoundError,
    RequestFailedError,
)
from tinsmith.types import ModelInput, SamplingParams

STREAM = "/api/v1/sample_stream"
PROMPT = ModelInput.from_ints([1, 2])
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="m")


def body(*events: tuple[str, dict[str, Any]]) -> bytes:
    return "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events).encode()


def answer(*events: tuple[str, dict[str, Any]], **options: Any) -> Answer:
    return Answer(
        200, body(*events), {"content-type": "text/event-stream; charset=utf-8"}, **options
    )


TWO = [("tokens", {"index": 0, "tokens": [n], "logprobs": [-0.5]}) for n in (5, 6)]
FINISH = ("finish", {"index": 0, "stop_reason": "stop"})


@pytest.mark.parametrize("fault", [None, "slow_body"])
def test_a_plain_loop_gets_tokens_as_they_come(
    stub: Any, sampler: SamplingClient, fault: str | None
) -> None:
    """S92"""
    stub.on(STREAM, answer(*TWO, FINISH, fault=fault))
    pieces = list(sampler.stream(PROMPT, PARAMS))
    assert [piece.tokens for piece in pieces] == [[5], [6], []]
    assert pieces[-1].stop_reason == "stop" and pieces[0].logprobs == [-0.5]
    request = stub.seen("/sample_stream")[0]
    assert request.headers["accept"] == "text/event-stream" and request.json()["seq_id"] == 0


async def test_an_async_loop_does_too(stub: Any, sampler: SamplingClient) -> None:
    stub.on(STREAM, answer(*TWO, FINISH))
    assert [p.tokens async for p in sampler.stream(PROMPT, PARAMS)] == [[5], [6], []]


def test_several_sequences_share_a_stream(stub: Any, sampler: SamplingClient) -> None:
    other = ("finish", {"index": 1, "stop_reason": "length"})
    stub.on(STREAM, answer(TWO[0], other, TWO[1], FINISH))
    ends = {p.index: p.stop_reason for p in sampler.stream(PROMPT, PARAMS, 2) if p.stop_reason}
    assert ends == {0: "stop", 1: "length"}


def test_leaving_the_loop_closes_the_connection(stub: Any, sampler: SamplingClient) -> None:
    endless = answer(*TWO * 20_000, fault="slow_body")
    stub.on(STREAM, endless)
    for piece in sampler.stream(PROMPT, PARAMS):
        assert piece.tokens == [5]
        num_connections = len(stub._writers)
        break
    deadline = time.monotonic() + 30
    while len(stub._writers) >= num_connections and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(stub._writers) == num_connections - 1
    assert sampler.holder.api.stats.current()["sample"].in_flight == 0


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer(TWO[0]), APIConnectionError),
        (answer(TWO[0], FINISH, fault="truncate"), None),
        (answer(TWO[0], fault="truncate"), APIConnectionError),
        (answer(TWO[0], ("error", {"error": "boom", "category": "server"})), RequestFailedError),
        (answer(("tokens", {"tokens": "x"})), APIResponseValidationError),
        (Answer(200, {"not": "a stream"}), APIResponseValidationError),
        (Answer(404, {"detail": "no streams here"}), NotFoundError),
    ],
)
def test_what_goes_wrong_reaches_the_loop(
    stub: Any, sampler: SamplingClient, reply: Answer, error: type[Exception] | None
) -> None:
    stub.on(STREAM, reply)
    if error is None:
        assert len(list(sampler.stream(PROMPT, PARAMS))) == 2
        return
    with pytest.raises(error):
        list(sampler.stream(PROMPT, PARAMS))
    assert stub.count("/sample_stream") == 1


def test_memory_stays_flat_over_a_long_stream(stub: Any, sampler: SamplingClient) -> None:
    """S92: the reader sets the pace, whatever the length of the stream."""
    import tracemalloc

    many = body(("tokens", {"tokens": list(range(10_000, 12_000)), "logprobs": [-1.0] * 2_000}))

    def stream(request: Recorded) -> Answer:
        kind = {"content-type": "text/event-stream"}
        last = body(FINISH)
        pieces = itertools.chain(itertools.repeat(many, 700), [last])
        return Answer(200, b"", kind, with_length=False, pieces=pieces)

    stub.on(STREAM, stream)
    tracemalloc.start()
    total = sum(len(piece.tokens) for piece in sampler.stream(PROMPT, PARAMS))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 1_400_000
    assert peak < 1_500_000 < len(many) * 700 / 5, "of a stream of more than 10 MB"
