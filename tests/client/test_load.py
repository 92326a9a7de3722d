"""Many samples at once, while training and heartbeats go on."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import Answer, Recorded
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.types import AdamParams, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints(list(range(50)))
PARAMS = SamplingParams(max_tokens=2)
PEAK_GROWTH_MB = 200.0
"""For two thousand samples held open at the server; about 65 kB each were measured."""


def step_seconds(training: TrainingClient, count: int = 9) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        training.optim_step(AdamParams()).result(30)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("with_poller", [False, True])
def test_a_process_under_load_stays_quick_small_and_leaves_nothing(
    stub: Any, with_poller: bool
) -> None:
    """S64, S77, S79, S111: the client in a process of its own, so that the numbers are its own."""
    stub.flags = {"sample_use_retrieve_futures": with_poller}
    release = asyncio.Event()
    held = 0

    async def hold(request: Recorded) -> Answer:
        nonlocal held
        if "Sample" in request.headers.get("x-tinker-request-type", ""):
            held += 1
            await release.wait()
        answer: Answer = await stub._do_retrieve_future(request)
        return answer

    async def hold_all(request: Recorded) -> Answer:
        await release.wait()
        answer: Answer = await stub._do_retrieve_futures(request)
        return answer

    def let_go(request: Recorded) -> Answer:
        release.set()
        return Answer(200, b"0")

    def number(count: Callable[[], int]) -> Callable[[Recorded], Answer]:
        return lambda request: Answer(200, str(count()).encode())

    stub.on("/api/v1/retrieve_future", hold)
    stub.on("/api/v1/retrieve_futures", hold_all)
    stub.on("/release", let_go)
    stub.on("/held", number(lambda: stub.count("/asample") if with_poller else held))
    stub.on("/beats", number(lambda: stub.count("/session_heartbeat")))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("load_program.py")), stub.url],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # Within twice the idle time, with room for the clock of a busy machine.
    assert found["busy_ms"] < 2 * found["idle_ms"] + 2, found
    assert found["beats_per_second"] > 5, found
    assert found["peak_growth_mb"] < PEAK_GROWTH_MB, found
    assert (found["sockets_left"], found["tasks_left"], found["threads_left"]) == (0, 0, 0), found
