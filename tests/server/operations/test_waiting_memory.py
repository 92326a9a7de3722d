"""What training requests take in memory while they wait."""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tinsmith.engine.base import FinishedPass, Pass
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.tuning import Tuning
from tinsmith.types import (
    Datum,
    EncodedTextChunk,
    ModelInput,
    PromptProvenanceSpan,
)
from tinsmith.wire import json

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer


class WeighingEngine(FakeEngine):
    """Notes the bytes of the passes that it gets in a call."""

    @functools.cached_property
    def weights(self) -> list[int]:
        return []

    def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self.weights.append(sum(datum.nbytes for each in passes for datum in each.data))
        return super().run_passes(passes)


PASSES = 8
TENSOR = np.ones(1, np.float32)


def _one_token() -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": [2], "weights": [1.0]},
    )


def _many_chunks() -> Datum:
    chunks = [EncodedTextChunk(tokens=[1]) for _ in range(32)]
    return Datum(
        model_input=ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": np.ones(32, int)}
    )


def _many_inputs() -> Datum:
    names = {f"input {number}": TENSOR for number in range(32)}
    return Datum(
        model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2], **names}
    )


def _many_spans() -> Datum:
    spans = [PromptProvenanceSpan(length=1, sequence_id=f"s{n}") for n in range(32)]
    tokens = np.ones(32, int)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": tokens}
    )
    return datum.with_provenance(spans, spans)


def _long() -> Datum:
    tokens = np.ones(1024, int)
    return Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": tokens})


async def _send_some_that_wait(
    api: Api, datum: Datum, number: int, *, as_json: bool = False
) -> None:
    """They wait for number 1, which does not come."""
    model_id = await api.model()
    for seq_id in range(2, 2 + number):
        if as_json:
            inputs = {"data": [datum.to_wire()] * 200, "loss_fn": "cross_entropy"}
            body = {"forward_backward_input": inputs, "model_id": model_id, "seq_id": seq_id}
            answer = await api.post("/forward_backward", json.encode(body))
        else:
            answer = await api.post_pass(model_id, seq_id, [datum] * 200)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("make", "as_json"),
    [
        (_one_token, False),
        (_many_chunks, False),
        (_many_inputs, False),
        (_many_spans, False),
        (_long, False),
        (_one_token, True),
        (_long, True),
    ],
)
async def test_requests_that_wait_take_no_more_memory_than_is_counted(
    start_server: StartServer, make: Callable[[], Datum], as_json: bool
) -> None:
    """In JSON a number has two bytes, and eight afterwards."""
    server = await start_server(gap_timeout_seconds=600, max_queued_memory_bytes=2**34)
    # Whatever is loaded for the first one.
    await _send_some_that_wait(server.api, make(), 1, as_json=as_json)
    gc.collect()
    tracemalloc.start()
    counted = server.service.models.held_bytes
    try:
        before, _ = tracemalloc.get_traced_memory()
        await _send_some_that_wait(server.api, make(), PASSES, as_json=as_json)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = server.service.models.held_bytes - counted
    assert 0.3 * counted < taken < 1.2 * counted


async def test_what_an_owner_has_no_room_for_waits_on_disk(start_server: StartServer) -> None:
    server = await start_server(gap_timeout_seconds=600, max_queued_memory_bytes=8 * 2**20)
    rude, kind = await server.other_user(), server.api
    await _send_some_that_wait(rude, _one_token(), PASSES)
    held = server.service.models.held_bytes
    assert 0 < held <= 2**20, "an eighth is one owner's"
    await _send_some_that_wait(kind, _one_token(), 1)
    assert server.service.models.held_bytes > held, "others have their own part"


async def test_requests_of_few_tokens_and_many_bytes_are_read_a_few_at_a_time(
    start_server: StartServer,
) -> None:
    """By their tokens alone, all that an owner may queue would be in memory at once."""
    tuning = Tuning(batch_bytes=3 * 2**20)
    server = await start_server(engine=WeighingEngine, max_queued_memory_bytes=8, tuning=tuning)
    api, weights = server.api, np.ones(2**18, np.float32)  # 1 MiB
    model_id = await api.model()
    datum = Datum(
        model_input=ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": [2], "weights": [1.0], "beside it": weights},
    )
    promises = [await api.post_pass(model_id, seq_id, [datum]) for seq_id in (2, 3, 4, 5, 6, 1)]
    for promise in promises:
        error, category = await api.failure(promise.json()["request_id"])
        assert "beside it" in error and category == "user"
    (engine,) = server.engines
    assert isinstance(engine, WeighingEngine)
    assert sum(engine.weights) > 6 * 2**20 and max(engine.weights) < 3 * 2**20
    assert len(engine.weights) == 3, "as many as fit go together"
