"""Operations run in the order of their numbers, each once, whatever the network does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tinsmith.server.operations.kinds import operation_of
from tinsmith.server.operations.operation import Operation
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.store.errors import StoreUnavailableError
from tinsmith.server.store.records import ModelRecord, OperationRecord
from tinsmith.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput
from tinsmith.wire import proto
from tinsmith.wire.operation_ids import ids_at_front

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer

PROTO = "application/x-protobuf"
DATA = [[1, 2, 3], [1, 2, 4], [5, 6, 7]]


def _operation(seq_id: int) -> Operation:
    record = OperationRecord(
        request_id=str(seq_id),
        model_id="m",
        seq_id=seq_id,
        owner="o",
        kind="forward",
        content_type="",
        created_at=0.0,
    )
    return operation_of(record)


def test_a_queue_gives_out_operations_by_number() -> None:
    queue = SequenceQueue(1)
    for seq_id in (3, 1, 2):
        queue.put(_operation(seq_id))
    assert [queue.take().seq_id for _ in range(3)] == [1, 2, 3]
    assert queue.head() is None


def test_a_queue_waits_for_a_missing_number_and_skips_refused_ones() -> None:
    queue = SequenceQueue(1, used=[2])
    queue.put(_operation(4))
    assert queue.head() is None and queue.missing() == [1, 3]
    queue.use_up(3)
    queue.use_up(1)
    head = queue.head()
    assert head is not None and head.seq_id == 4


def test_what_is_put_back_is_taken_again_in_order() -> None:
    queue = SequenceQueue(1, used=[3])
    for seq_id in (1, 2, 4, 5):
        queue.put(_operation(seq_id))
    taken = [queue.take() for _ in range(3)]
    for operation in (taken[2], taken[1]):
        queue.put(operation)
    assert [queue.take().seq_id for _ in range(3)] == [2, 4, 5]


async def _train_in_order(api: Api) -> float:
    model = await api.model()
    for seq_id, tokens in enumerate(DATA, start=1):
        await api.result(await api.send_pass(model, seq_id, _datum(tokens)))
    await api.result(await api.send_step(model, 4))
    return await api.loss(model, 5)


def _datum(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


async def test_chunks_that_arrive_as_3_2_1_give_the_result_of_1_2_3(api: Api) -> None:
    """S35."""
    expected = await _train_in_order(api)
    model = await api.model()
    step = await api.send_step(model, 4)
    for seq_id in (3, 2, 1):
        await api.send_pass(model, seq_id, _datum(DATA[seq_id - 1]))
    await api.result(step)
    assert await api.loss(model, 5) == expected


async def test_posting_every_request_twice_changes_nothing(api: Api) -> None:
    """S35: a retried request finds the first, and no gradient is added twice."""
    expected = await _train_in_order(api)
    model = await api.model()
    for seq_id, tokens in enumerate(DATA, start=1):
        first = await api.send_pass(model, seq_id, _datum(tokens))
        assert await api.send_pass(model, seq_id, _datum(tokens)) == first
        await api.result(first)
        assert await api.send_pass(model, seq_id, _datum(tokens)) == first
    first, second = await asyncio.gather(api.send_step(model, 4), api.send_step(model, 4))
    assert first == second
    assert await api.loss(model, 5) == expected


async def test_retries_that_arrive_while_the_first_is_being_recorded_get_its_id(api: Api) -> None:
    model = await api.model()
    ids = await asyncio.gather(*[api.send_pass(model, 1) for _ in range(20)])
    assert len(set(ids)) == 1
    assert (await api.output(ids[0])).metrics["loss:sum"] > 0


async def test_creating_the_same_model_again_gives_the_same_model(api: Api) -> None:
    session = await api.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tinsmith/fake",
        "lora_config": {"rank": 4},
    }
    promises = await asyncio.gather(*[api.ok("/create_model", body) for _ in range(5)])
    assert len({p["request_id"] for p in promises}) == 1
    assert (await api.result(promises[0]["request_id"]))["model_id"] == f"{session}:train:0"


async def test_a_refused_request_uses_up_its_number(api: Api) -> None:
    """A 400 leaves no gap: what follows does not wait for it."""
    model = await api.model()
    response = await api.post("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": 3})
    assert response.status_code == 400 and response.json()["detail"]
    assert int(response.headers["content-length"]) > 0
    assert await api.loss(model, 2) > 0


async def test_an_unreadable_pass_uses_up_its_number(api: Api) -> None:
    model = await api.model()
    body = orjson.dumps({"model_id": model, "seq_id": 1, "forward_backward_input": {"data": 5}})
    assert (await api.post("/forward_backward", body)).status_code == 400
    assert await api.loss(model, 2) > 0


async def test_a_pass_that_breaks_off_uses_up_its_number(api: Api) -> None:
    """The ids come first in the message, so what follows need not wait for the time limit."""
    model = await api.model()
    inputs = ForwardBackwardInput([_datum(DATA[0])], "cross_entropy")
    whole = proto.encode_pass(ForwardBackwardRequest(inputs, model, 1))
    cut = whole[: len(whole) - 5]
    response = await api.post("/forward_backward", cut, **{"content-type": PROTO})
    assert response.status_code == 400
    async with asyncio.timeout(30):
        assert await api.loss(model, 2) > 0


async def test_a_pass_that_is_too_large_uses_up_its_number(start_server: StartServer) -> None:
    server = await start_server(max_body_bytes=5000)
    api = server.api
    model = await api.model()
    response = await api.post_pass(model, 1, [_datum(list(range(200)) * 20)])
    assert response.status_code == 413
    async with asyncio.timeout(30):
        assert await api.loss(model, 2) > 0


@pytest.mark.parametrize("body", [b"", b"\x0a", b"\x0a\x7fabc", b"\x0a\x01m\x10", b"\x12\x01m\x10"])
def test_ids_are_not_found_where_they_are_not(body: bytes) -> None:
    assert ids_at_front(body) is None


async def test_a_gap_is_waited_for_and_then_fails_the_later_operations(
    start_server: StartServer,
) -> None:
    server = await start_server(gap_timeout_seconds=0.5)
    api = server.api
    model = await api.model()
    error, category = await api.failure(await api.send_pass(model, 3))
    assert "1, 2" in error and category == "user"
    # The numbers are used up now, also for a request that arrives late.
    late = await api.post_pass(model, 2, [_datum(DATA[0])])
    assert late.status_code == 400 and "too late" in late.json()["detail"]
    assert await api.loss(model, 4) > 0


async def test_what_was_recorded_unheard_does_not_run_behind_those_that_waited_for_it(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to the store was lost after the commit. Whoever asked for its result waited
    for ever; and the next start carried it out, behind operations with later numbers."""
    server = await start_server(gap_timeout_seconds=0.5)
    api, log = server.api, server.service.store.log
    model = await api.model()

    async def record(operation: OperationRecord, new: ModelRecord | None = None) -> Any:
        await type(log).record(log, operation, new)
        raise StoreUnavailableError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(log, "record", record)
        assert (await api.post_pass(model, 1, [_datum(DATA[0])])).status_code == 503
    await api.failure(await api.send_pass(model, 2))
    unheard = await api.send_pass(model, 1, _datum(DATA[0]))
    async with asyncio.timeout(20):
        error, category = await api.failure(unheard)
    assert "waited 0.5 s for operation 1" in error and category == "user"
    await api.output(await api.send_pass(model, 3))
    await server.stop()
    server = await start_server()
    assert await server.api.failure(unheard) == (error, category)


async def test_a_gap_that_had_ended_when_the_server_died_is_not_waited_for_again(
    start_server: StartServer,
) -> None:
    """The ends were on disk, and what else is written then was not."""
    server = await start_server(gap_timeout_seconds=0.5)
    model = await server.api.model()
    await server.api.failure(await server.api.send_pass(model, 3))
    live = server.service.models.find(model)
    assert live is not None
    await server.until(lambda: not live.is_busy)
    await server.service.store.models.update(model, {"closed_seq_id": -1})
    await server.stop()
    server = await start_server(gap_timeout_seconds=60)
    async with asyncio.timeout(50):
        assert await server.api.loss(model, 4) > 0
    late = await server.api.post_pass(model, 2, [_datum(DATA[0])])
    assert late.status_code == 400 and "too late" in late.json()["detail"]


async def test_a_failed_operation_does_not_stop_those_behind_it(api: Api) -> None:
    model = await api.model()
    bad = await api.send_pass(model, 1, _datum([1, 2, 5000]))
    error, category = await api.failure(bad)
    assert "5000" in error and category == "user"
    assert await api.loss(model, 2) > 0


async def test_one_slow_model_does_not_hold_up_another(start_server: StartServer) -> None:
    """S37: a model that waits for a missing number stands alone."""
    server = await start_server()
    waiting, running = await server.api.model(), await server.api.model()
    await server.api.send_pass(waiting, 2)
    async with asyncio.timeout(30):
        assert await server.api.loss(running, 1) > 0


async def test_passes_of_many_models_go_to_the_engine_together(start_server: StartServer) -> None:
    server = await start_server(fake_pass_seconds=0.05)
    api = server.api
    models = [await api.model() for _ in range(4)]
    requests = await asyncio.gather(
        *[api.send_pass(model, seq_id) for model in models for seq_id in (1, 2)]
    )
    await asyncio.gather(*[api.result(r) for r in requests])
    shown = dict(line.rsplit(b" ", 1) for line in server.service.metrics.render().splitlines())
    assert float(shown[b"tinsmith_batch_passes_sum"]) == 8
    assert float(shown[b"tinsmith_batch_passes_count"]) <= 3, "eight passes need two or three"


@pytest.mark.parametrize("seq_id", [0, -1, 10**9])
async def test_impossible_numbers_are_refused(api: Api, seq_id: int) -> None:
    model = await api.model()
    body = {"model_id": model, "seq_id": seq_id, "adam_params": {}}
    assert (await api.post("/optim_step", body)).status_code == 400


async def test_tenants_get_what_they_would_get_alone(server: TestServer) -> None:
    """Two models trained at the same time end where each ends by itself."""
    api = server.api
    alone = await _train_in_order(api)
    together = await asyncio.gather(_train_in_order(api), _train_in_order(api))
    assert together == [alone, alone]


async def test_requests_beyond_the_memory_for_them_wait_on_disk(start_server: StartServer) -> None:
    server = await start_server(max_queued_memory_bytes=16_000)  # one of the three
    expected = await _train_in_order(server.api)
    model = await server.api.model()
    ids = [await server.api.send_step(model, 4)]
    for seq_id in (3, 2, 1):
        ids.append(await server.api.send_pass(model, seq_id, _datum(DATA[seq_id - 1])))
    for request_id in ids:
        await server.api.result(request_id)
    assert await server.api.loss(model, 5) == expected
    assert server.service.models.held_bytes == 0
