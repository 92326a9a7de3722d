"""Two thousand samples in flight beside training, in a process of their own: `python … URL`.

Prints what the parent checks: latencies, memory, and what is left when everything is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path

from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.client.uplink.loop import io_loop
from tinsmith.transport.config import ClientConfig
from tinsmith.types import AdamParams, ModelInput, SamplingParams

SAMPLES = 2000
URL = sys.argv[1]


def step_seconds(training: TrainingClient, during_seconds: float) -> float:
    """The median time of a step, one after the other for so long."""
    times = []
    end = time.perf_counter() + during_seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        training.optim_step(AdamParams()).result(30)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names alone are wanted
        with contextlib.suppress(OSError):  # the listing's own is gone
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")  # noqa: PTH115
    return found


def tasks() -> int:
    return len(asyncio.all_tasks(io_loop()))


def get(path: str) -> int:
    with urllib.request.urlopen(URL + path, timeout=60) as answer:
        number: int = json.load(answer)
        return number


def wait_for(path: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while get(path) < count:
        assert time.monotonic() < deadline, f"{path} is {get(path)}, not {count}"
        time.sleep(0.02)


def main() -> dict[str, float]:
    io_loop()
    before = {"sockets": sockets(), "tasks": tasks(), "threads": threading.active_count()}
    config = ClientConfig(base_url=URL, api_key="tml-load", telemetry=False, heartbeat_seconds=0.05)
    service = ServiceClient(config=config)
    training = service.create_lora_training_client("m")
    sampler = service.create_sampling_client(base_model="m")
    step_seconds(training, 0.1)
    idle = step_seconds(training, 1.0)
    base = peak_mb()

    prompt = ModelInput.from_ints(list(range(200)))
    params = SamplingParams(max_tokens=2)
    futures = [sampler.sample(prompt, 1, params) for _ in range(SAMPLES)]
    wait_for("/held", SAMPLES)
    beats = get("/beats")
    started = time.monotonic()
    busy = step_seconds(training, 1.0)
    seconds = time.monotonic() - started
    beats = get("/beats") - beats
    get("/release")
    results = [future.result(60) for future in futures]
    peak = peak_mb()
    in_flight = {"sockets": sockets(), "tasks": tasks()}
    service.close("success").result(30)
    del futures, results, sampler, training, service
    gc.collect()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (
        sockets() > before["sockets"] or tasks() > before["tasks"]
    ):
        time.sleep(0.05)
    return {
        "idle_ms": idle * 1e3,
        "busy_ms": busy * 1e3,
        "beats_per_second": beats / seconds,
        "peak_growth_mb": peak - base,
        "sockets_before_close": in_flight["sockets"],
        "sockets_left": sockets() - before["sockets"],
        "tasks_left": tasks() - before["tasks"],
        "threads_left": threading.active_count() - before["threads"],
    }


if __name__ == "__main__":
    print(json.dumps(main()))
