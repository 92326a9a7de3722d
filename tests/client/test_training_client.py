"""TrainingClient against the service in memory: order, turns, chunks, failures."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.calls.passes import PassFuture
from tinsmith.client.futures import as_completed
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    BadRequestError,
    TinkerError,
    ValidationError,
)
from tinsmith.types import AdamParams, Datum, DimuonParams, ModelInput, SamplingParams

FORWARD_BACKWARD = "/api/v1/forward_backward"


def datums(count: int, num_tokens: int = 4) -> list[Datum]:
    return [
        Datum(
            ModelInput.from_ints(list(range(num_tokens))),
            {"target_tokens": [7] * num_tokens, "weights": [float(i)] * num_tokens},
        )
        for i in range(count)
    ]


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("m")


def make_training(
    stub: Any, make_service: Callable[..., ServiceClient], **flags: Any
) -> TrainingClient:
    stub.flags = flags
    return make_service().create_lora_training_client("m")


def test_operations_arrive_in_the_order_of_calls(stub: Any, training: TrainingClient) -> None:
    """S18, S30, S34: mixed operations, ids 1, 2, 3, … without a gap."""
    draw = random.Random(0)
    calls: list[Callable[[], Any]] = [
        lambda: training.forward_backward(datums(2), "cross_entropy"),
        lambda: training.forward(datums(1), "cross_entropy"),
        lambda: training.optim_step(AdamParams()),
        lambda: training.save_state("a"),
        lambda: training.save_weights_for_sampler("b"),
        lambda: training.save_weights_external("c"),
    ]
    futures = [draw.choice(calls)() for _ in range(40)]
    for future in futures:
        future.result(10)
    assert [seq_id for _, seq_id in stub.order] == list(range(1, 41))


def test_order_holds_when_the_server_answers_at_random_times(
    stub: Any, training: TrainingClient
) -> None:
    """S31"""
    draw = random.Random(1)
    original = stub._do_optim_step

    async def slow(request: Recorded) -> Answer:
        await asyncio.sleep(draw.random() * 0.02)
        answer: Answer = original(request)
        return answer

    stub.on("/api/v1/optim_step", slow)
    for future in [training.optim_step(AdamParams()) for _ in range(25)]:
        future.result(10)
    assert [seq_id for _, seq_id in stub.order] == list(range(1, 26))
    assert stub.most_open["/api/v1/optim_step"] == 1


def test_a_hundred_threads_get_dense_ids(stub: Any, training: TrainingClient) -> None:
    """S30"""
    futures: list[Any] = []
    barrier = threading.Barrier(100)

    def step() -> None:
        barrier.wait()
        futures.append(training.optim_step(AdamParams()))

    threads = [threading.Thread(target=step) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result(20)
    assert [seq_id for _, seq_id in stub.order] == list(range(1, 101))


def test_five_chunks_come_before_the_step_and_the_first_of_them_last(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S32, S33: chunks of one call overlap, nothing else does."""
    training = make_training(stub, make_service, fwdbwd_max_chunk_len=2)
    original = stub._do_forward_backward

    async def slow(request: Recorded) -> Answer:
        await asyncio.sleep(0.03)
        answer: Answer = original(request)
        return answer

    stub.on(FORWARD_BACKWARD, slow)
    passed = training.forward_backward(datums(10), "cross_entropy")
    stepped = training.optim_step(AdamParams())
    output = passed.result(10)
    stepped.result(10)
    arrived = [seq_id for name, seq_id in stub.order]
    assert sorted(arrived[:4]) == [2, 3, 4, 5] and arrived[4:] == [1, 6]
    assert stub.most_open[FORWARD_BACKWARD] == 4
    assert len(output.loss_fn_outputs) == 10
    assert output.metrics["loss:sum"] == sum(4.0 * i for i in range(10))
    connections = {r.connection for r in stub.seen("/forward_backward")[:4]}
    assert len(connections) == 4, "each on a connection of its own (S63)"


def test_chunks_go_one_by_one_when_the_service_says_so(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S32: with the flag off there are never two open training requests of a model."""
    training = make_training(
        stub, make_service, fwdbwd_max_chunk_len=2, parallel_fwdbwd_chunks=False
    )
    training.forward_backward(datums(10), "cross_entropy").result(10)
    assert [seq_id for _, seq_id in stub.order] == [1, 2, 3, 4, 5]
    assert stub.most_open[FORWARD_BACKWARD] == 1


def test_chunk_outputs_can_be_had_before_the_last_is_done(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S48"""
    training = make_training(stub, make_service, fwdbwd_max_chunk_len=2)
    held = asyncio.Event()
    stub.hold = {"r2": held}  # r1 was the creation; this is the first promise of the pass
    future = training.forward_backward(datums(6), "cross_entropy")
    assert isinstance(future, PassFuture) and len(future.chunks) == 3
    early = []
    for chunk in as_completed(future.chunks, timeout=5):
        early.append(chunk)
        if len(early) == 2:
            break
    assert not future.done()
    stub._loop.call_soon_threadsafe(held.set)
    assert len(future.result(5).loss_fn_outputs) == 6
    assert all(len(chunk.result(1).loss_fn_outputs) == 2 for chunk in future.chunks)


def test_calls_return_at_once_while_the_server_is_slow(stub: Any, training: TrainingClient) -> None:
    """S36: it answers when the calls have returned."""
    have_returned = asyncio.Event()
    original = stub._do_optim_step

    async def slow(request: Recorded) -> Answer:
        await have_returned.wait()
        answer: Answer = original(request)
        return answer

    stub.on("/api/v1/optim_step", slow)
    futures = [training.optim_step(AdamParams()) for _ in range(3)]
    stub._loop.call_soon_threadsafe(have_returned.set)
    for future in futures:
        future.result(20)


def test_one_stalled_model_holds_up_nobody_else(stub: Any, service: ServiceClient) -> None:
    """S37, S64: another model, sampling and the session go on."""
    stalled = service.create_lora_training_client("m")
    other = service.create_lora_training_client("m")
    original = stub._do_optim_step

    async def by_model(request: Recorded) -> Answer:
        if request.json()["model_id"].endswith(":0"):
            await asyncio.sleep(30)
        answer: Answer = original(request)
        return answer

    stub.on("/api/v1/optim_step", by_model)
    stalled.optim_step(AdamParams())
    started = time.perf_counter()
    other.optim_step(AdamParams()).result(20)
    assert time.perf_counter() - started < 20


def test_a_refused_operation_does_not_stop_the_next(stub: Any, training: TrainingClient) -> None:
    """S38: the next id, and it runs."""
    stub.on("/api/v1/optim_step", Answer(400, {"detail": "no such optimizer"}))
    with pytest.raises(BadRequestError, match="no such optimizer"):
        training.optim_step(AdamParams()).result(5)
    del stub.handlers["/api/v1/optim_step"]
    training.optim_step(AdamParams()).result(5)
    assert stub.order == [("optim_step", 2)]


def test_a_refused_chunk_leaves_no_gap_and_the_error_reaches_everybody(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    """S38: the first id is still sent, so that the service does not wait for it."""
    training = make_training(stub, make_service, fwdbwd_max_chunk_len=1)
    original = stub._do_forward_backward
    stub.on(
        FORWARD_BACKWARD,
        lambda request: (
            Answer(400, {"detail": "bad token"})
            if b"\x10\x03" in request.body[:40]
            else original(request)
        ),
    )
    future = training.forward_backward(datums(4), "cross_entropy")
    with pytest.raises(BadRequestError, match="bad token"):
        future.result(5)
    assert isinstance(future, PassFuture)
    with pytest.raises(BadRequestError):
        future.chunks[2].result(1)
    del stub.handlers[FORWARD_BACKWARD]
    training.optim_step(AdamParams()).result(5)
    assert sorted(seq_id for _, seq_id in stub.order) == [1, 2, 4, 5]


def test_a_queued_operation_can_be_cancelled_and_the_next_runs(
    stub: Any, training: TrainingClient
) -> None:
    """S39, S43: at any moment, also before it has begun."""
    stub.on("/api/v1/save_weights", Answer(200, {"request_id": "r1"}, delay=0.2))
    training.save_state("slow")
    queued = [training.optim_step(AdamParams()) for _ in range(5)]
    for future in queued[::2]:
        assert future.cancel()
    for future in queued[1::2]:
        assert future.result(5).metrics == {"lr": 0.1}
    assert [seq_id for _, seq_id in stub.order] == [3, 5]


@pytest.mark.parametrize(
    ("script", "requests"),
    [
        ([Answer(503), Answer(408), Answer(fault="reset")], 4),
        ([Answer(409)], 2),
        ([Answer(429, headers={"retry-after-ms": "2"})], 2),
    ],
)
def test_a_retried_operation_keeps_its_id_and_its_key(
    stub: Any, training: TrainingClient, script: list[Answer], requests: int
) -> None:
    """S51: one idempotency key over all attempts."""
    original = stub._do_optim_step
    stub.on("/api/v1/optim_step", *script, original)
    training.optim_step(AdamParams()).result(5)
    seen = stub.seen("/optim_step")
    assert len(seen) == requests
    assert len({r.headers["x-idempotency-key"] for r in seen}) == 1
    assert {r.json()["seq_id"] for r in seen} == {1}
    assert stub.order == [("optim_step", 1)]


def test_mistakes_in_arguments_take_no_id(stub: Any, training: TrainingClient) -> None:
    """S17: an unknown loss is refused before anything is sent."""
    with pytest.raises(ValueError, match="at least one datum"):
        training.forward_backward([], "cross_entropy")
    with pytest.raises(ValidationError, match="loss_fn"):
        training.forward_backward(datums(1), "my_module.loss")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="AdamParams"):
        training.optim_step()
    with pytest.raises(ValueError, match="not both"):
        training.optim_step(AdamParams(), adam_params=AdamParams())
    with pytest.raises(ValidationError):
        training.save_state(3)  # type: ignore[arg-type]
    training.optim_step(AdamParams()).result(5)
    assert stub.order == [("optim_step", 1)]


def test_another_optimizer_family_goes_under_its_own_name(
    stub: Any, training: TrainingClient
) -> None:
    training.optim_step(DimuonParams(learning_rate=0.1)).result(5)
    assert stub.seen("/optim_step")[0].json()["optimizer_params"]["type"] == "dimuon"


def test_bodies_are_compressed_when_the_service_asks(
    stub: Any, make_service: Callable[..., ServiceClient]
) -> None:
    training = make_training(stub, make_service, proto_compress_fwdbwd=True)
    training.forward_backward(datums(2), "cross_entropy").result(5)
    assert stub.seen("/forward_backward")[0].headers["content-encoding"] == "zstd"
    assert len(stub.passes) == 1


def test_in_flight_bytes_are_bounded(stub: Any, make_service: Callable[..., ServiceClient]) -> None:
    """S49: many chunks never exceed the configured bytes in flight by more than one."""
    chunk = datums(1, 100)[0].nbytes
    training = make_training(
        stub,
        make_service,
        fwdbwd_max_chunk_len=1,
        fwdbwd_dispatch_bytes_semaphore_size=3 * chunk - 1,
    )
    original = stub._do_forward_backward

    async def slow(request: Recorded) -> Answer:
        await asyncio.sleep(0.002)
        answer: Answer = original(request)
        return answer

    stub.on(FORWARD_BACKWARD, slow)
    training.forward_backward(datums(60, 100), "cross_entropy").result(20)
    assert stub.most_open[FORWARD_BACKWARD] <= 3


def test_a_stopped_service_is_a_connection_error(stub: Any, training: TrainingClient) -> None:
    stub.on("/api/v1/optim_step", Answer(fault="reset"))
    with pytest.raises(APIConnectionError):
        training.optim_step(AdamParams()).result(10)


async def test_async_twins_return_futures_like_their_siblings(training: TrainingClient) -> None:
    """S44"""
    passed = await training.forward_backward_async(datums(1), "cross_entropy")
    stepped = await training.optim_step_async(AdamParams())
    assert (await passed).metrics and (await stepped).metrics == {"lr": 0.1}
    assert (await (await training.save_state_async("x"))).path.endswith("/weights/x")
    sampler = await training.save_weights_and_get_sampling_client_async()
    assert "'s1:sample:0'" in repr(sampler)


@pytest.mark.parametrize("way", ["dropped", "pickled", "handed on"])
def test_an_unnamed_sampler_is_released_when_its_only_client_is_dropped(
    stub: Any, training: TrainingClient, way: str
) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    if way == "pickled":
        pickle.dumps(sampler)
    if way == "handed on":
        sampler.get_sampler_handle()
    pending = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
    del sampler
    gc.collect()
    pending.result(10)
    training.optim_step(AdamParams()).result(10)  # the sample's last breath is over
    gc.collect()
    deadline = time.monotonic() + (30 if way == "dropped" else 0.2)
    while not (released := stub.seen("/samplers/s1:sample:0")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [r.method for r in released] == (["DELETE"] if way == "dropped" else [])
    kinds = [r.path.rpartition("/")[2] for r in stub.requests]
    assert not released or kinds.index("asample") < kinds.index("s1:sample:0"), "not before"


def test_a_twin_goes_through_its_sibling(training: TrainingClient) -> None:
    """Packages wrap the plain methods; the async ones must follow."""
    called = []

    class Wrapped(TrainingClient):
        def optim_step(self, *args: Any, **kwargs: Any) -> Any:
            called.append("optim_step")
            return super().optim_step(*args, **kwargs)

    wrapped = Wrapped(training.holder, 0, training.model_id)
    asyncio.run(wrapped.optim_step_async(AdamParams()))
    assert called == ["optim_step"]


def test_deprecated_names_warn_and_work(stub: Any, training: TrainingClient) -> None:
    with pytest.warns(FutureWarning, match="create_training_client_from_state"):
        training.load_state("tinker://a/weights/b").result(5)
    with pytest.warns(DeprecationWarning, match="no effect"):
        training.save_weights_and_get_sampling_client("name")
    assert stub.seen("/load_weights")[0].json()["optimizer"] is False


def test_a_save_without_a_path_in_the_answer_is_an_error(
    stub: Any, training: TrainingClient
) -> None:
    stub.on(
        "/api/v1/save_weights_for_sampler",
        lambda request: stub.promise(Answer(200, {"path": None})),
    )
    with pytest.raises(TinkerError, match="'path'"):
        training.save_weights_for_sampler("x").result(5)


def test_an_answer_that_is_no_promise_says_what_came(stub: Any, training: TrainingClient) -> None:
    for answer in (Answer(200, {"nothing": 1}), Answer(200, b"<html>"), Answer(200, [1])):
        stub.on("/api/v1/optim_step", answer)
        with pytest.raises(TinkerError, match="UntypedAPIFuture"):
            training.optim_step(AdamParams()).result(5)


def test_info_and_console(stub: Any, training: TrainingClient) -> None:
    assert training.get_info().model_data.model_name == "m"
    assert training.get_console_url().endswith(training.model_id)
    stub.on("/api/v1/get_info", Answer(404, {"detail": "gone"}))
    with pytest.raises(APIStatusError, match="gone"):
        training.get_info()
