"""Many samples at once, while training and heartbeats go on."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Answer, Recorded

from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.types import AdamParams, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints(list(range(50)))
PARAMS = SamplingParams(max_tokens=2)


def step_seconds(training: TrainingClient, count: int = 9) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        training.optim_step(AdamParams()).result(30)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("with_poller", [False, True])
def test_two_thousand_samples_starve_nobody(
    stub: Any, make_service: Callable[..., ServiceClient], with_poller: bool
) -> None:
    """S62, S64, S65, S111: all samples held at the server, and a step takes as long as ever."""
    stub.flags = {"sample_use_retrieve_futures": with_poller}
    service = make_service(heartbeat_seconds=0.05)
    training = service.create_lora_training_client("m")
    sampler = service.create_sampling_client(base_model="m")
    idle = step_seconds(training)
    release = asyncio.Event()
    path = "/api/v1/retrieve_futures" if with_poller else "/api/v1/retrieve_future"
    original = stub._do_retrieve_futures if with_poller else stub._do_retrieve_future

    async def held(request: Recorded) -> Answer:
        if with_poller or "Sample" in request.headers.get("x-tinker-request-type", ""):
            await release.wait()
        answer: Answer = await original(request)
        return answer

    stub.on(path, held)
    before = open_files()
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(2000)]
    deadline = time.monotonic() + 60
    while stub.count("/asample") < 2000 and time.monotonic() < deadline:
        time.sleep(0.02)
    if not with_poller:
        while stub.open_now.get(path, 0) < 2000 and time.monotonic() < deadline:
            time.sleep(0.02)
    beats = stub.count("/session_heartbeat")
    busy = step_seconds(training)
    assert stub.count("/session_heartbeat") > beats or busy < 0.005
    # Within twice the idle time, with room for the clock of a busy machine.
    assert busy < 2 * idle + 0.02, (busy, idle)
    stub._loop.call_soon_threadsafe(release.set)
    results = [future.result(60) for future in futures]
    assert len({result.sequences[0].sequence_id for result in results}) == 2000
    assert sorted(body["seq_id"] for body in stub.samples.values()) == list(range(2000))
    service.close("success").result(30)
    del futures, results, sampler, training, service
    gc.collect()
    deadline = time.monotonic() + 10
    while open_files() > before + 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= before + 10, "no socket is left, on neither side"
