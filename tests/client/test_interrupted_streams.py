"""A loop over a stream that is cancelled while it waits for the next piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.scripted_server import Answer
from tinsmith.client.service import ServiceClient
from tinsmith.types import ModelInput, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::tinsmith.client.warn.ExperimentalWarning")


async def test_a_cancelled_loop_ends_at_once_and_closes_its_connection(
    stub: Any, service: ServiceClient
) -> None:
    """S43"""
    event = f"event: tokens\ndata: {json.dumps({'index': 0, 'tokens': [5]})}\n\n"
    kind = {"content-type": "text/event-stream"}
    # A byte each millisecond: most of the time the loop waits for the rest of an event.
    slow = Answer(200, event.encode() * 10_000, kind, fault="slow_body")
    stub.on("/api/v1/sample_stream", slow)
    sampler = await service.create_sampling_client_async(base_model="m")
    has_begun = asyncio.Event()

    async def read() -> None:
        async for _ in sampler.stream(ModelInput.from_ints([1]), SamplingParams(max_tokens=4)):
            has_begun.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(has_begun.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert sampler.holder.api.stats.current()["sample"].in_flight == 0
