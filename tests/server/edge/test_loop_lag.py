"""Large answers do not hold up the event loop: everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from tests.server.routes.test_lists import fill_audit, fill_checkpoints, fill_usage
from tinsmith.server.edge.lists import LONGEST_LIST
from tinsmith.server.futures import Outcome
from tinsmith.server.store.records import OperationRecord
from tinsmith.server.traces import session_trace
from tinsmith.types import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    TensorData,
    UntypedAPIFuture,
)
from tinsmith.wire import proto

if TYPE_CHECKING:
    from tests.server.routes.test_lists import Fill
    from tests.support.in_process_server import TestServer

MAX_STRETCH_SECONDS = 0.05


@asynccontextmanager
async def stretches() -> AsyncIterator[list[float]]:
    """How long the loop computed between two chances for others to run: processor time, so that
    other programs on the machine do not count."""
    late: list[float] = []

    async def probe() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            late.append(time.thread_time() - before)

    task = asyncio.create_task(probe())
    await asyncio.sleep(0.01)
    late.clear()
    try:
        yield late
    finally:
        await asyncio.sleep(0.002)
        task.cancel()


def _pass_outcome() -> Outcome:
    scores = TensorData.from_numpy(np.full(2000, -1.5, np.float32))
    output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": scores}] * 1024, {"loss:sum": 1.0})
    return Outcome(result_type="output", body=proto.encode_output(output))


def _sample_outcome() -> Outcome:
    tokens, scores = np.arange(500, dtype=np.int32), np.full(500, -1.5, np.float32)
    sequence = SampledSequence("length", "", tokens, scores)
    response = SampleResponse([sequence] * 4096, prompt_logprobs_np=np.full(4000, -2, np.float32))
    return Outcome(result_type="sample", body=proto.encode_sample(response))


@pytest.mark.parametrize("make", [_pass_outcome, _sample_outcome])
async def test_a_large_result_as_json_leaves_the_loop_free(
    server: TestServer, make: Callable[[], Outcome]
) -> None:
    record = await server.service.store.models.get(await server.api.model())
    assert record is not None
    server.service.promises.open("large", record.owner)
    server.service.promises.resolve("large", make(), time.time())
    async with stretches() as late:
        response = await server.api.retrieve("large", headers={"accept": "application/json"})
    assert response.status_code == 200 and len(response.content) > 5_000_000
    assert max(late) < MAX_STRETCH_SECONDS


async def test_a_pass_of_some_datums_is_decoded_in_its_owners_turn(server: TestServer) -> None:
    model_id = await server.api.model()
    datum = Datum(
        model_input=ModelInput.from_ints(range(1, 65)),
        loss_fn_inputs={"target_tokens": list(range(2, 66)), "weights": [1.0] * 64},
    )
    release = threading.Event()
    others = asyncio.create_task(server.service.workers.run("other", release.wait, 10))
    sent = asyncio.create_task(server.api.send_pass(model_id, 1, *[datum] * 32))
    try:
        await asyncio.wait([sent], timeout=0.3)
        assert not sent.done(), "decoded on the event loop"
    finally:
        release.set()
    await others
    await server.api.output(await sent)


async def test_a_prompt_of_many_chunks_is_put_together_in_its_owners_turn(
    server: TestServer,
) -> None:
    """On its way to an engine each chunk would cost the event loop some microseconds."""
    session = {"session_id": await server.api.session(), "sampling_session_seq_id": 0}
    path = "/create_sampling_session"
    created = await server.api.ok(path, {**session, "base_model": "tinsmith/fake"})
    sampler_id = created["sampling_session_id"]
    tokens = list(range(1, 201))
    whole = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    cut = {"chunks": [{"type": "encoded_text", "tokens": [token]} for token in tokens]}
    release = threading.Event()
    others = asyncio.create_task(server.service.workers.run("other", release.wait, 10))
    sent = asyncio.create_task(server.api.sample(sampler_id, 1, prompt=cut))
    try:
        await asyncio.wait([sent], timeout=0.3)
        assert not sent.done(), "put together on the event loop"
    finally:
        release.set()
    await others
    expected = await server.api.sample(sampler_id, 2, prompt=whole)
    assert [s.tokens for s in (await sent).sequences] == [s.tokens for s in expected.sequences]


async def test_long_texts_of_one_owner_leave_threads_for_another(server: TestServer) -> None:
    """Prompts that are rendered, curves and examples: whoever asks for many waits for his own."""
    model_id = await server.api.model()
    release = threading.Event()
    texts = server.service.texts
    greedy = [asyncio.create_task(texts.run("greedy", release.wait, 60)) for _ in range(20)]
    try:
        async with asyncio.timeout(30):
            answer = await server.api.get(f"/training_runs/{model_id}/metrics")
        assert answer.status_code == 200
        assert not any(task.done() for task in greedy)
    finally:
        release.set()
    await asyncio.gather(*greedy)


def test_the_ids_of_thousands_of_samples_are_written_in_one_look() -> None:
    ids = [f"sample-{number}" for number in range(4096)]
    promise = UntypedAPIFuture(request_id="sample", sample_sequence_ids=ids)
    taken = []
    for _ in range(5):
        began = time.thread_time()
        written = promise.to_wire()
        taken.append(time.thread_time() - began)
    assert written["sample_sequence_ids"] == ids
    assert min(taken) < 0.001, "seven times as much when each is looked at by itself"


async def test_a_long_trace_is_streamed_in_pieces_that_leave_the_loop_free() -> None:
    operations = [
        OperationRecord(
            request_id=str(number),
            model_id="m",
            seq_id=number,
            owner="o",
            kind="optim_step",
            content_type="application/json",
            created_at=float(number),
        )
        for number in range(30_000)
    ]

    def gives(value: Any) -> Callable[..., Awaitable[Any]]:
        async def give(*_: Any) -> Any:
            return value

        return give

    async def pages(*_: Any) -> AsyncIterator[list[OperationRecord]]:
        yield operations

    store: Any = SimpleNamespace(
        models=SimpleNamespace(of_session=gives([SimpleNamespace(model_id="m")] * 2)),
        log=SimpleNamespace(pages=pages),
    )
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    pieces = [piece async for piece in session_trace(store, "s")]
    other.cancel()
    trace = orjson.loads(b"".join(pieces))
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) == 60_000
    most = max(piece.count(b'"ph":"X"') for piece in pieces)
    assert 0 < most <= 1000, "some milliseconds' work"
    assert turns >= 60_000 // most, "others run after each piece"
    empty: Any = SimpleNamespace(models=SimpleNamespace(of_session=gives([])))
    assert orjson.loads(b"".join([p async for p in session_trace(empty, "s")]))["traceEvents"] == []


@pytest.mark.parametrize("fill", [fill_audit, fill_usage, fill_checkpoints])
async def test_a_long_list_is_put_together_beside_the_loop(server: TestServer, fill: Fill) -> None:
    path, name, query = await fill(server, LONGEST_LIST)
    async with stretches() as late:
        listed = await server.api.get(path, **query)
    assert len(listed.json()[name]) == LONGEST_LIST
    assert max(late) < MAX_STRETCH_SECONDS
