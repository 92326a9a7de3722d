"""SamplingClient: back-pressure, limits, lost promises, standstill, other processes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.client.sampling_calls import (
    ASAMPLE,
    PARAMS,
    PROMPT,
    RETRIEVE,
    comes_true,
    make_sampler,
    sample,
)
from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.results.queue_state import QueueState
from tinsmith.client.results.retries import RetryConfig
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.service import ServiceClient
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    BadRequestError,
    RequestFailedError,
    TinkerError,
    ValidationError,
)
from tinsmith.types import ImageChunk, SamplingParams, TensorData


def test_a_sample_has_its_sequences_and_their_ids(stub: Any, sampler: SamplingClient) -> None:
    response = sampler.sample(PROMPT, 3, PARAMS, include_prompt_logprobs=True).result(5)
    assert [s.tokens for s in response.sequences] == [[5, 6]] * 3
    assert [s.sequence_id for s in response.sequences] == ["r1:0", "r1:1", "r1:2"]
    assert response.prompt_logprobs == [None, -0.5, -0.5]
    request = stub.seen("/asample")[0]
    assert request.headers["x-tinker-sampling-backpressure"] == "1"
    assert request.json() == {
        "num_samples": 3,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": "s1:sample:0",
        "seq_id": 0,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    }


def test_log_probabilities_of_a_prompt(stub: Any, sampler: SamplingClient) -> None:
    assert sampler.compute_logprobs(PROMPT).result(5) == [None, -0.5, -0.5]
    assert sampler.compute_logprobs(PROMPT, 1).result(5) == [None, None, -0.5]
    assert stub.seen("/asample")[0].json()["sampling_params"]["max_tokens"] == 1


def test_images_travel_inside_the_prompt(stub: Any, sampler: SamplingClient) -> None:
    """S25, S94"""
    prompt = PROMPT.append(ImageChunk(data=b"\x89PNG", format="png", expected_tokens=7))
    assert prompt.length == 10
    sample(sampler, prompt).result(5)
    chunk = stub.seen("/asample")[0].json()["prompt"]["chunks"][1]
    assert base64.b64decode(chunk["data"]) == b"\x89PNG" and chunk["type"] == "image"


def test_back_pressure_delays_and_does_not_fail(stub: Any, sampler: SamplingClient) -> None:
    """S57: the same request is sent again, under the same id."""
    hint = {"retry-after-ms": "5"}
    original = stub._do_asample
    stub.on(ASAMPLE, *[Answer(429, headers=hint)] * 3, original)
    sample(sampler).result(5)
    assert [r.json()["seq_id"] for r in stub.seen("/asample")] == [0, 0, 0, 0]


def test_the_servers_pause_holds_for_all_samplers_of_the_service_client(
    stub: Any, service: ServiceClient, make_service: Callable[..., ServiceClient]
) -> None:
    """S58, S59, S60: shared within, not without."""
    one = service.create_sampling_client(base_model="m")
    two = service.create_sampling_client(base_model="m")
    stranger = make_service(api_key="tml-other").create_sampling_client(base_model="m")
    refused = False

    def once(request: Recorded) -> Answer:
        nonlocal refused
        if not refused:
            refused = True
            return Answer(429, headers={"retry-after-ms": "1500"})
        answer: Answer = stub._do_asample(request)
        return answer

    stub.on(ASAMPLE, once)
    first = sample(one)
    while not refused:
        time.sleep(0.005)
    time.sleep(0.03)
    sample(stranger).result(10)
    sample(two).result(10)
    first.result(10)
    refusal, theirs, *ours = stub.seen("/asample")
    assert not theirs.json()["sampling_session_id"].startswith("s1")
    assert all(r.arrived - refusal.answered > 1.45 for r in ours) and len(ours) == 2


def test_few_are_sent_for_a_while_after_back_pressure(stub: Any, sampler: SamplingClient) -> None:
    """S61: dispatch is throttled after a back-off."""
    original = stub._do_asample

    async def slow(request: Recorded) -> Answer:
        await asyncio.sleep(0.01)
        answer: Answer = original(request)
        return answer

    stub.on(ASAMPLE, Answer(429, headers={"retry-after-ms": "5"}), slow)
    sample(sampler).result(5)
    stub.most_open.clear()
    for future in [sample(sampler) for _ in range(60)]:
        future.result(20)
    assert stub.most_open[ASAMPLE] <= 10


def test_two_hundred_samples_do_not_wait_for_each_other(stub: Any, sampler: SamplingClient) -> None:
    """S65, S111: none has its result before all are asked for."""
    original = stub._do_retrieve_future
    num_asked, all_are_asked = 0, asyncio.Event()

    async def slow(request: Recorded) -> Answer:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 200:
            all_are_asked.set()
        await all_are_asked.wait()
        answer: Answer = await original(request)
        return answer

    stub.on(RETRIEVE, slow)
    for future in [sample(sampler) for _ in range(200)]:
        future.result(60)
    assert sorted(body["seq_id"] for body in stub.samples.values()) == list(range(200))


def test_the_service_limits_how_many_are_in_flight(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S66"""
    sampler = make_sampler(stub, make_service, sample_max_concurrent_requests=5)
    original = stub._do_retrieve_future

    async def slow(request: Recorded) -> Answer:
        await asyncio.sleep(0.005)
        answer: Answer = await original(request)
        return answer

    stub.on(RETRIEVE, slow)
    for future in [sample(sampler) for _ in range(40)]:
        future.result(20)
    assert stub.most_open[RETRIEVE] <= 5


@pytest.mark.parametrize(
    ("script", "requests"),
    [
        ([Answer(503), Answer(408), Answer(fault="reset")], 4),
        ([Answer(409)] * 6, 7),
        ([Answer(400, b"")], 2),
    ],
)
def test_a_failed_submission_is_repeated_by_one_layer_only(
    stub: Any, sampler: SamplingClient, script: list[Answer], requests: int
) -> None:
    """S51: the same id each time; nothing is submitted anew."""
    stub.on(ASAMPLE, *script, stub._do_asample)
    sample(sampler).result(10)
    assert [r.json()["seq_id"] for r in stub.seen("/asample")] == [0] * requests


def test_a_lost_promise_is_made_again_under_a_new_id(stub: Any, sampler: SamplingClient) -> None:
    stub.on(RETRIEVE, Answer(410), Answer(410), stub._do_retrieve_future)
    sample(sampler).result(10)
    assert [r.json()["seq_id"] for r in stub.seen("/asample")] == [0, 1, 2]


def test_no_retries_when_the_service_says_so(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    sampler = make_sampler(stub, make_service, sample_no_retries=True)
    stub.on(RETRIEVE, Answer(410))
    with pytest.raises(TinkerError, match="no longer has the result"):
        sample(sampler).result(5)
    assert stub.count("/asample") == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(400, {"detail": "too long"}), BadRequestError),
        (Answer(200, {"no": "promise"}), APIResponseValidationError),
    ],
)
def test_a_refused_sample_is_not_repeated(
    stub: Any, sampler: SamplingClient, answer: Answer, error: type[Exception]
) -> None:
    stub.on(ASAMPLE, answer)
    with pytest.raises(error):
        sample(sampler).result(5)
    assert stub.count("/asample") == 1


def test_a_failed_sample_is_not_repeated(stub: Any, sampler: SamplingClient) -> None:
    stub.on(RETRIEVE, Answer(200, {"error": "no", "category": "user"}))
    with pytest.raises(RequestFailedError):
        sample(sampler).result(5)
    assert stub.count("/asample") == 1


def test_a_standstill_is_an_error_and_slow_progress_is_not(
    stub: Any, service: ServiceClient
) -> None:
    """S67: a black hole is noticed in about the progress timeout."""
    config = RetryConfig(progress_timeout=0.4)
    sampler = service.create_sampling_client(base_model="m", retry_config=config)
    stub.on(RETRIEVE, Answer(fault="stall"))
    started = time.monotonic()
    futures = [sample(sampler) for _ in range(5)]
    for future in futures:
        with pytest.raises(APIConnectionError, match="appear to be stuck"):
            future.result(10)
    assert 0.3 < time.monotonic() - started < 8
    original = stub._do_retrieve_future

    async def slow(request: Recorded) -> Answer:
        # One after another, each well within the timeout, all together well beyond it.
        await asyncio.sleep(0.2 * (1 + int(request.json()["request_id"][1:]) % 5))
        answer: Answer = await original(request)
        return answer

    stub.on(RETRIEVE, slow)
    patient = service.create_sampling_client(
        base_model="m", retry_config=RetryConfig(progress_timeout=0.9)
    )
    for future in [sample(patient) for _ in range(5)]:
        future.result(10)


def test_progress_is_logged_now_and_then(
    stub: Any, sampler: SamplingClient, caplog: pytest.LogCaptureFixture
) -> None:
    """S68: at most every couple of seconds, whatever the load."""
    with caplog.at_level("DEBUG", logger="tinsmith.client.results.retries"):
        for future in [sample(sampler) for _ in range(100)]:
            future.result(30)
    moments = [r.created for r in caplog.records if "in flight" in r.message]
    assert moments
    assert all(after - before > 1.5 for before, after in itertools.pairwise(moments))


def test_cancelling_a_sample_reaches_the_service_and_frees_its_place(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S43"""
    stub.switches = {"sample_cancel_enabled": True}
    sampler = make_sampler(stub, make_service, sample_max_concurrent_requests=1)
    stub.on(RETRIEVE, Answer(fault="stall"))
    stuck = sample(sampler)
    while not stub.count("/retrieve_future"):
        time.sleep(0.005)
    del stub.handlers[RETRIEVE]
    assert stuck.cancel()
    sample(sampler).result(5)
    deadline = time.monotonic() + 30
    while not stub.count("/cancel_future") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stub.seen("/cancel_future")[0].json() == {"request_id": "r1"}


async def test_a_sample_that_is_no_longer_awaited_is_cancelled(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    stub.switches = {"sample_cancel_enabled": True}
    sampler = await asyncio.to_thread(make_sampler, stub, make_service)
    stub.on(RETRIEVE, Answer(fault="stall"))
    waiting = asyncio.create_task(sampler.sample_async(PROMPT, 1, PARAMS))
    assert await comes_true(lambda: stub.count("/retrieve_future") == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await comes_true(lambda: stub.count("/cancel_future") == 1)


async def test_what_sample_returns_can_be_awaited_and_blocked_on(
    sampler: SamplingClient,
) -> None:
    future = sampler.sample(PROMPT, 1, SamplingParams())
    assert isinstance(future, Future)
    response = await future
    assert future.result() is response
    assert await sampler.compute_logprobs(PROMPT)
    both = await asyncio.gather(*(sampler.sample(PROMPT, 1, SamplingParams()) for _ in range(2)))
    assert len(both) == 2


def test_a_clock_that_jumps_changes_nothing(
    stub: Any, make_service: Callable[..., ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delays and limits are measured with a clock that nobody sets."""
    jumps = itertools.cycle([1e9, 0.0, 2e9, 5e8])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    sampler = make_sampler(stub, make_service)
    stub.on(ASAMPLE, Answer(503), Answer(429, headers={"retry-after-ms": "5"}), stub._do_asample)
    sample(sampler).result(30)
    assert stub.count("/asample") == 3
    told = stub.seen("/retrieve_future")[-1].headers["x-tinker-create-promise-roundtrip-time"]
    assert 0 <= float(told) < 30, "the clock jumps by millions of seconds and more"


def test_mistakes_are_found_before_anything_is_sent(stub: Any, sampler: SamplingClient) -> None:
    wrong: list[dict[str, Any]] = [
        {"target_prompt_logprobs": TensorData.from_numpy(np.zeros((2, 1), "f4"))},
        {"target_prompt_logprobs": TensorData.from_numpy(np.zeros(2, "i8"))},
        {"prompt_alt_tokens_k": -1},
        {"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True},
        {"prompt_logprobs_last_n": 1},
    ]
    for options in wrong:
        with pytest.raises(ValidationError):
            sampler.sample(PROMPT, 1, PARAMS, **options)
    assert stub.count("/asample") == 0


def test_a_service_that_ignores_a_question_does_not_pass_for_an_answer(
    stub: Any, sampler: SamplingClient
) -> None:
    with pytest.raises(TinkerError, match="prompt_alt_tokens_k=2"):
        sampler.sample(PROMPT, 1, PARAMS, prompt_alt_tokens_k=2).result(5)


def test_a_promise_without_sequence_ids_is_an_error(stub: Any, sampler: SamplingClient) -> None:
    stub.on(
        ASAMPLE,
        lambda request: stub.promise(Answer(200, b"", {"content-type": "application/x-protobuf"})),
    )
    with pytest.raises(APIResponseValidationError, match="sample_sequence_ids"):
        sample(sampler).result(5)


def test_the_paused_state_can_be_observed(stub: Any, service: ServiceClient) -> None:
    """S71"""
    seen = []

    class Watching(SamplingClient):
        def on_queue_state_change(
            self, queue_state: QueueState, queue_state_reason: str | None
        ) -> None:
            seen.append((queue_state, queue_state_reason))

    sampler = Watching(service.holder, sampling_session_id="s1:sample:0")
    body = {"type": "try_again", "request_id": "r1", "queue_state": "paused_rate_limit"}
    stub.on(RETRIEVE, Answer(408, body), stub._do_retrieve_future)
    sample(sampler).result(5)
    assert seen == [(QueueState.PAUSED_RATE_LIMIT, None)]


def test_a_path_must_be_a_tinker_path(service: ServiceClient) -> None:
    with pytest.raises(ValueError, match="tinker://"):
        service.create_sampling_client(model_path="/weights")
    with pytest.raises(ValueError, match="model_path or base_model"):
        service.create_sampling_client()


def test_about_the_sampler(stub: Any, sampler: SamplingClient) -> None:
    assert sampler.get_base_model() == "m"
    assert asyncio.run(sampler.get_base_model_async()) == "m"
    assert "x-sdk-method" not in stub.seen("/samplers/s1:sample:0")[0].headers
