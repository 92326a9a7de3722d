"""Streams whose readers take their time: the place in the engine is not theirs to hold."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.server.sampling.test_samplers import freeze
from tinsmith.engine.base import Failure, SampleEvent, SampleJob, TokensSampled
from tinsmith.server.sampling.requests import sample_job
from tinsmith.server.sampling.stream_buffer import Patience
from tinsmith.types import ModelInput, SampleRequest, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.in_process_server import StartServer, TestServer


async def _stream(server: TestServer, max_tokens: int) -> AsyncGenerator[SampleEvent, None]:
    """A stream on an unnamed sampler, the only one that the engine has room for."""
    model = await server.api.model()
    sampler_id = await freeze(server.api, model, 1)
    sampler = await server.service.samplers.get(sampler_id, "owner")
    assert sampler is not None
    params = SamplingParams(max_tokens=max_tokens, seed=5)
    request = SampleRequest(prompt=ModelInput.from_ints([1, 2]), sampling_params=params)
    job: SampleJob = replace(sample_job("job", sampler, request), stream=True)
    return server.service.sampling.stream(sampler, job)


async def _others_sample(server: TestServer) -> None:
    """Takes the one place, as soon as it is free."""
    other = await server.other_user()
    sampler = await freeze(other, await other.model(), 1)
    async with asyncio.timeout(60):
        await other.sample(sampler)


async def test_a_stream_that_nobody_reads_gives_its_place_up_when_it_has_been_sampled(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=1, fake_token_seconds=0.001)
    async with aclosing(await _stream(server, max_tokens=20)) as events:
        first = await anext(events)
        await _others_sample(server)
        rest = [event async for event in events]
    assert isinstance(first, TokensSampled) and isinstance(rest[-1], SampleResponse)
    tokens = [t for e in [first, *rest] if isinstance(e, TokensSampled) for t in e.tokens.tolist()]
    assert tokens == rest[-1].sequences[0].tokens, "nothing is lost to a reader who comes back"


async def test_a_stream_too_long_to_be_kept_waits_for_its_reader_and_then_ends(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=1, fake_token_seconds=0.001)
    server.service.sampling.patience = Patience(max_events=3, seconds=0.1)
    async with aclosing(await _stream(server, max_tokens=500)) as events:
        seen = [await anext(events)]
        await _others_sample(server)
        seen += [event async for event in events]
    assert isinstance(seen[-1], Failure) and "read too slowly" in seen[-1].message
    assert len(seen) == 1 + 3 + 1, "what was kept, and the reason"
    await server.until(lambda: not server.engines[-1].running_samples)


async def test_a_stream_that_is_read_in_time_has_no_limit(start_server: StartServer) -> None:
    server = await start_server(max_loaded_samplers=1)
    server.service.sampling.patience = Patience(max_events=1, seconds=5.0)
    async with aclosing(await _stream(server, max_tokens=500)) as events:
        seen = [event async for event in events]
    assert isinstance(seen[-1], SampleResponse) and len(seen) > 20
