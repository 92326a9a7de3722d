"""A number stands for one request: repeats find the first, others are refused, and none that was
refused is waited for."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.in_process_server import PROBE
from tinsmith.server.operations import recorded_pass
from tinsmith.server.operations.codecs import PassCodec
from tinsmith.server.operations.gaps import GapWatch
from tinsmith.server.operations.kinds import KINDS, operation_of
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.operations.recorded_pass import RecordedPass
from tinsmith.server.store.records import ModelRecord, OperationRecord
from tinsmith.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ModelInput,
    SaveWeightsForSamplerRequest,
)
from tinsmith.wire import proto
from tinsmith.wire.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.in_process_server import Api, StartServer, TestServer


def _datum(*tokens: int, **more: Any) -> Datum:
    inputs = {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={**inputs, **more})


async def test_a_number_used_again_for_another_body_is_a_conflict(api: Api) -> None:
    model = await api.model()
    first = await api.send_pass(model, 1, _datum(1, 2, 3))
    other = await api.post_pass(model, 1, [_datum(1, 2, 4)])
    assert other.status_code == 400
    assert "number 1" in other.json()["detail"] and "forward_backward" in other.json()["detail"]
    assert await api.send_pass(model, 1, _datum(1, 2, 3)) == first
    await api.result(first)
    assert (await api.post_pass(model, 1, [_datum(1, 2, 4)])).status_code == 400


async def test_a_number_used_again_for_another_kind_is_a_conflict(api: Api) -> None:
    model = await api.model()
    await api.send_pass(model, 1)
    body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    refused = await api.post("/optim_step", body)
    assert refused.status_code == 400 and "forward_backward" in refused.json()["detail"]
    forward = await api.post_pass(model, 1, [_datum(1, 2, 3, 4, 5)], forward_only=True)
    assert forward.status_code == 400
    assert await api.loss(model, 2) > 0, "the refused ones used up no number"


async def test_of_two_requests_that_arrive_together_with_one_number_one_is_refused(
    api: Api,
) -> None:
    model = await api.model()
    bodies = [[_datum(1, 2, token)] for token in (3, 4)]
    answers = await asyncio.gather(*[api.post_pass(model, 1, body) for body in bodies])
    assert sorted(answer.status_code for answer in answers) == [200, 400]


async def test_a_model_created_again_in_another_way_is_a_conflict(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tinsmith/fake"}
    first = await api.ok("/create_model", {**body, "lora_config": {"rank": 4}})
    again = await api.ok("/create_model", {**body, "lora_config": {"rank": 4}})
    assert again == first, "also without a seed, which the server draws"
    other = await api.post("/create_model", {**body, "lora_config": {"rank": 8}})
    assert other.status_code == 400 and "create_model" in other.json()["detail"]


async def test_who_read_an_operation_before_it_ended_does_not_run_it_again(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry with a large body deletes the file of it meanwhile; the result may be forgotten."""
    api, models = server.api, [await server.api.model() for _ in range(2)]
    ids = [await api.send_pass(model, 1) for model in models]
    for request_id in ids:
        await api.output(request_id)
    log = server.service.store.log
    record = log.record

    async def late(*given: Any) -> tuple[OperationRecord, bool]:
        found, is_new = await record(*given)
        return dataclasses.replace(found, status="pending"), is_new

    with monkeypatch.context() as patch:
        patch.setattr(log, "record", late)
        server.service.promises.forget(ids)
        assert await api.send_pass(models[0], 1) == ids[0]
    assert not server.service.models.backlog_of("owner").num_operations
    for model in models:
        await api.result(await api.send_step(model, 2))
    assert len({await api.loss(model, 3) for model in models}) == 1


async def test_a_model_that_was_asked_for_before_it_was_recorded_is_found_afterwards(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, store = server.api, server.service.store.models
    session = await api.session()
    get, is_asked, is_there = store.get, asyncio.Event(), asyncio.Event()

    async def slow(model_id: str) -> ModelRecord | None:
        found = await get(model_id)
        if found is None:
            is_asked.set()
            await is_there.wait()
        return found

    monkeypatch.setattr(store, "get", slow)
    early = asyncio.create_task(api.post_pass(f"{session}:train:0", 1, [_datum(1, 2)]))
    await is_asked.wait()
    creating = asyncio.create_task(api.create_model(session))
    while await get(f"{session}:train:0") is None:  # noqa: ASYNC110  # nobody announces it
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    is_there.set()
    assert (await early).status_code == 404
    assert await api.loss(await creating, 1) > 0


async def test_a_save_sent_again_with_another_sampler_number_is_the_same_save(api: Api) -> None:
    """The official client draws that number for each attempt."""
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    first = await api.ok("/save_weights_for_sampler", body)
    body["sampling_session_seq_id"] = 1
    assert await api.ok("/save_weights_for_sampler", body) == first


async def test_request_ids_are_in_the_order_of_time(api: Api) -> None:
    """So that the store's index of them grows at its end."""
    model, ids = await api.model(), []
    for number in range(1, 6):
        ids.append(await api.send_pass(model, number))
        await asyncio.sleep(0.003)
    assert ids == sorted(ids) and len({len(each) for each in ids}) == 1


def test_a_digest_does_not_depend_on_how_the_request_was_written() -> None:
    plain = _datum(1, 2, 3)
    turned = Datum(
        model_input=plain.model_input,
        loss_fn_inputs=dict(reversed(plain.loss_fn_inputs.items())),
    )
    digests = {
        PassCodec(forward_only=False).digest(
            RecordedPass(
                ForwardBackwardRequest(
                    ForwardBackwardInput([datum], "cross_entropy", config), "model", 1
                ),
                choices,
            )
        )
        for datum, config in [(plain, {"a": 1.0, "b": 2.0}), (turned, {"b": 2.0, "a": 1.0})]
        for choices in [(), (np.zeros((2, 1, 1), np.uint8),)]
    }
    assert len(digests) == 1


def test_a_digest_depends_on_everything_else() -> None:
    data = [[_datum(1, 2, 3)], [_datum(1, 2, 4)], [_datum(2, 2, 3)], [_datum(1, 2, 3)] * 2]
    data.append([_datum(1, 2, 3, weights=[1.0, 0.5])])
    digest = PassCodec(forward_only=False).digest
    passes = [ForwardBackwardInput(each, "cross_entropy") for each in data]
    passes.append(ForwardBackwardInput(data[0], "ppo"))
    passes.append(ForwardBackwardInput(data[0], "cross_entropy", {"a": 1.0}))
    requests = [ForwardBackwardRequest(each, "m", 1) for each in passes]
    assert len({digest(RecordedPass(request)) for request in requests}) == len(passes)
    saves = [SaveWeightsForSamplerRequest(model_id="m", seq_id=1, path=path) for path in "xy"]
    codec = KINDS["save_weights_for_sampler"].codec
    assert codec.digest(saves[0]) != codec.digest(saves[1])


async def test_a_request_too_large_for_its_key_leaves_no_gap(start_server: StartServer) -> None:
    server = await start_server(key_max_queued_bytes=600)
    model = await server.api.model()
    large = await server.api.post_pass(model, 1, [_datum(*range(200))])
    assert large.status_code == 413 and "600" in large.json()["detail"]
    async with asyncio.timeout(30):
        assert await server.api.loss(model, 2) > 0


async def test_what_others_wait_for_is_let_in_though_they_fill_the_room(
    start_server: StartServer,
) -> None:
    """To refuse it would keep them, and so the room, until the gap is given up."""
    server = await start_server(key_max_queued_bytes=300)
    model = await server.api.model()
    for number in range(2, 10):
        answer = await server.api.post_pass(model, number, [_datum(1, 2, 3)])
        if answer.status_code == 429:
            break
    assert answer.status_code == 429 and "300" in answer.json()["detail"]
    async with asyncio.timeout(30):
        await server.api.result(await server.api.send_pass(model, 1, _datum(1, 2, 3)))
        await server.api.result(await server.api.send_pass(model, number, _datum(1, 2, 3)))


async def test_an_owner_may_queue_so_many_requests(start_server: StartServer) -> None:
    server = await start_server(key_max_queued_operations=3)
    api, other = server.api, await server.other_user()
    model, free = await api.model(), await other.model()
    answers = [await api.post_pass(model, number, [_datum(1, 2, 3)]) for number in (2, 3, 4, 5)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429]
    assert "at most 3" in answers[3].json()["detail"]
    assert await other.loss(free, 1) > 0


async def test_a_number_far_ahead_is_refused_with_the_numbers(api: Api) -> None:
    model = await api.model()
    far = await api.post_pass(model, 1001 + 1, [_datum(1, 2, 3)])
    assert far.status_code == 400
    assert "1002" in far.json()["detail"] and "at most 1000" in far.json()["detail"]


async def test_a_gap_that_is_given_up_writes_no_rows(start_server: StartServer) -> None:
    server = await start_server(gap_timeout_seconds=0.5)
    model = await server.api.model()
    error, _ = await server.api.failure(await server.api.send_pass(model, 1000))
    assert "1, 2, 3" in error and len(error) < 200
    log = await server.service.store.log.read(model, -1)
    assert [operation.seq_id for operation in log] == [0, 1000]
    await server.stop()
    server = await start_server(gap_timeout_seconds=0.5)
    async with asyncio.timeout(30):
        assert await server.api.loss(model, 1001) > 0
    assert (await server.api.post_pass(model, 5, [_datum(1, 2, 3)])).status_code == 400


async def test_what_comes_just_as_a_gap_ends_comes_too_late(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was recorded and ran, though the store said by then that it had failed."""
    server = await start_server(gap_timeout_seconds=0.5)
    api, models = server.api, server.service.models
    model = await api.model()
    get, over, is_over = models.get, GapWatch.over, asyncio.Event()
    num_asked = 0

    async def get_until_then(model_id: str) -> LiveModel | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # it was checked; it is about to be recorded
            await is_over.wait()
        return await get(model_id)

    def over_just_then(watch: GapWatch, those: Iterable[LiveModel]) -> list[LiveModel]:
        found = over(watch, those)
        if found:
            is_over.set()
        return found

    waiting = await api.send_pass(model, 2)
    monkeypatch.setattr(models, "get", get_until_then)
    monkeypatch.setattr(GapWatch, "over", over_just_then)
    late = await api.post_pass(model, 1, PROBE)
    assert late.status_code == 400 and "too late" in late.json()["detail"]
    assert "operation 1" in (await api.failure(waiting))[0]
    assert await server.service.store.log.find(model, 1) is None
    assert await api.loss(model, 3) == await api.loss(await api.model(), 1), "nothing took effect"


async def test_a_clock_that_is_set_forward_gives_up_no_gap(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(gap_timeout_seconds=60)
    model = await server.api.model()
    waiting = await server.api.send_pass(model, 2)
    await asyncio.sleep(1.2)  # the gap has been noticed
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() + 3600)
    await asyncio.sleep(1.5)
    await server.api.send_pass(model, 1)
    await server.api.result(waiting)


def _waiting_model() -> LiveModel:
    record = ModelRecord(
        model_id="m",
        session_id="s",
        model_seq_id=0,
        owner="o",
        base_model="b",
        lora={},
        optimizer={},
        created_at=0.0,
        last_request_at=0.0,
    )
    queue = SequenceQueue(1)
    queue.put(
        operation_of(
            OperationRecord(
                request_id="r",
                model_id="m",
                seq_id=2,
                owner="o",
                kind="forward",
                content_type="",
                created_at=0.0,
            )
        )
    )
    return LiveModel(record=record, queue=queue)


def test_a_gap_is_over_when_it_has_been_watched_for_long_enough() -> None:
    clock = [0.0]
    watch, model = GapWatch(10.0, lambda: clock[0]), _waiting_model()
    ends = []
    for _ in range(12):
        clock[0] += 1.0
        ends.append(bool(watch.over([model])))
    assert ends == [False] * 9 + [True] * 3


def test_a_gap_that_begins_as_another_ends_is_waited_for_anew() -> None:
    clock = [0.0]
    watch, model = GapWatch(10.0, lambda: clock[0]), _waiting_model()
    for _ in range(9):
        clock[0] += 1.0
        assert watch.over([model]) == []
    model.queue.use_up(1)  # it came; and before the next look 2 has run, and 4 has come before 3
    model.queue.put(operation_of(dataclasses.replace(model.queue.take().record, seq_id=4)))
    clock[0] += 1.0
    assert watch.over([model]) == []


def test_time_in_which_the_server_did_not_run_keeps_nobody_waiting() -> None:
    clock = [0.0]
    watch, model = GapWatch(10.0, lambda: clock[0]), _waiting_model()
    for elapsed in (1.0, 36_000.0, 1.0):
        clock[0] += elapsed
        assert watch.over([model]) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_pass_is_read_with_the_experts_that_it_was_recorded_with(dtype: Any) -> None:
    """Each array with its datum; one has none."""
    inputs = ForwardBackwardInput([_datum(1, 2, 3)] * 3, "cross_entropy")
    request = ForwardBackwardRequest(inputs, "m", 1)
    first = np.arange(12, dtype=dtype).reshape(2, 3, 2)
    choices = (first, None, (first + np.iinfo(dtype).max - 11).astype(dtype))
    body = recorded_pass.encode(proto.encode_pass(request), "application/x-protobuf", choices)
    codec = PassCodec(forward_only=False)
    found = codec.decode(body, recorded_pass.WITH_EXPERTS, DEFAULT_LIMITS)
    assert found.request == request
    for one, other in zip(found.choices, choices, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype and (one == other).all()
