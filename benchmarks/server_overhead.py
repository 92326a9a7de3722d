"""What the server adds to a request, with an engine that answers at once (`--engine fake`).

    python benchmarks/server_overhead.py [--calls 200] [--rounds 3]

Three measurements, each repeated in turn and given as medians:

- the time from call to result of a small `forward_backward`, an `optim_step` and a `sample`, one
  after another, through the official client and through ours;
- acknowledged `optim_step` requests a second, many in flight, without a client's own cost;
- what a waiting long poll costs: processor time a second, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pyqwest import Client, HTTPTransport

from reports import write_report
from serving import Server, serve

MODEL = "tinsmith/fake"
IN_FLIGHT = 32
POLLS = 500
POLL_SECONDS = 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=200)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path, help="write the result to this file")
    options.add_argument("--worker", nargs=3, metavar=("PACKAGE", "URL", "KEY"))
    arguments = options.parse_args()
    if arguments.worker:
        package, url, key = arguments.worker
        print(json.dumps(round_trips(package, url, key, arguments.calls)))
        return
    result = measure(arguments.rounds, arguments.calls)
    for who, numbers in result.items():
        print(f"{who:10}", numbers)
    write_report(arguments.out, result)


def measure(rounds: int, calls: int) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {"tinker": {}, "tinsmith": {}, "server": {}}
    with serve("--engine", "fake") as server:
        for _ in range(rounds):
            for package in ("tinker", "tinsmith"):
                for name, value in run_worker(package, server, calls).items():
                    found[package].setdefault(name, []).append(value)
            for name, value in asyncio.run(acknowledged(server, calls * 10)).items():
                found["server"].setdefault(name, []).append(value)
        for name, value in asyncio.run(waiting(server)).items():
            found["server"].setdefault(name, []).append(value)
    return {
        who: {name: round(statistics.median(values), 3) for name, values in numbers.items()}
        for who, numbers in found.items()
    }


def run_worker(package: str, server: Server, calls: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--calls", str(calls)]
    done = subprocess.run(
        [*command, "--worker", package, server.url, server.key],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def round_trips(package: str, url: str, key: str, calls: int) -> dict[str, float]:
    sdk: Any = importlib.import_module(package)
    service = sdk.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    sampler = training.save_weights_and_get_sampling_client()
    data = [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints(list(range(1, 33))),
            loss_fn_inputs={
                "target_tokens": sdk.TensorData(data=list(range(2, 34)), dtype="int64", shape=[32]),
                "weights": sdk.TensorData(data=[1.0] * 32, dtype="float32", shape=[32]),
            },
        )
        for _ in range(4)
    ]
    adam = sdk.AdamParams(learning_rate=1e-4)
    prompt = sdk.ModelInput.from_ints([1, 2, 3])
    params = sdk.SamplingParams(max_tokens=4, seed=1)
    times: dict[str, list[float]] = {
        "forward_backward_ms": [],
        "optim_step_ms": [],
        "sample_ms": [],
    }
    for _ in range(calls):
        for name, call in (
            ("forward_backward_ms", lambda: training.forward_backward(data, "cross_entropy")),
            ("optim_step_ms", lambda: training.optim_step(adam)),
            ("sample_ms", lambda: sampler.sample(prompt, 1, params)),
        ):
            started = time.perf_counter()
            call().result()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


async def acknowledged(server: Server, requests: int) -> dict[str, float]:
    """Requests a second that are recorded and acknowledged, and their processor time."""
    async with HTTPTransport() as transport:
        post = poster(Client(transport), server)
        model_id = await new_model(post)
        ids = iter(range(1, requests + 1))
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}

        async def one_after_another() -> None:
            for seq_id in ids:
                body = {"model_id": model_id, "adam_params": adam, "seq_id": seq_id}
                await post("/api/v1/optim_step", body)

        cpu, started = server.cpu_seconds(), time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(IN_FLIGHT)))
        seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
    return {
        "acknowledged_per_second": requests / seconds,
        "cpu_ms_per_request": cpu / requests * 1e3,
    }


async def waiting(server: Server) -> dict[str, float]:
    """The cost of long polls of an operation that waits for another that never comes."""
    async with HTTPTransport() as transport:
        post = poster(Client(transport), server)
        model_id = await new_model(post)
        step = {"model_id": model_id, "adam_params": {"learning_rate": 1e-4}, "seq_id": 2}
        request_id = (await post("/api/v1/optim_step", step))["request_id"]
        poll = {"request_id": request_id, "allow_metadata_only": False}
        memory = server.memory_mb()
        polls = [asyncio.create_task(post("/api/v1/retrieve_future", poll)) for _ in range(POLLS)]
        await asyncio.sleep(3)
        cpu = server.cpu_seconds()
        grown = server.memory_mb() - memory
        await asyncio.sleep(POLL_SECONDS)
        cpu = server.cpu_seconds() - cpu
        for task in polls:
            task.cancel()
    return {
        "waiting_polls": POLLS,
        "cpu_percent_of_a_core_all_polls": cpu / POLL_SECONDS * 100,
        "memory_kb_per_poll": grown * 1024 / POLLS,
    }


def poster(client: Client, server: Server) -> Any:
    headers = {"x-api-key": server.key, "content-type": "application/json"}

    async def post(path: str, body: dict[str, Any]) -> Any:
        answer = await client.post(server.url + path, headers, json.dumps(body).encode())
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {answer.text()}")
        return json.loads(answer.content)

    return post


async def new_model(post: Any) -> str:
    session = await post(
        "/api/v1/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    )
    created = await post(
        "/api/v1/create_model",
        {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
        },
    )
    while True:
        answer = await post("/api/v1/retrieve_future", {"request_id": created["request_id"]})
        if answer.get("type") != "try_again":
            return str(answer["model_id"])


if __name__ == "__main__":
    main()
