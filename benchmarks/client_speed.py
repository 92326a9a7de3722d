"""The client's speed beside the official one's, on one machine, against one stub server.

    python benchmarks/client_speed.py [--rounds 3] [--measures sampling] [--tokens 256] [--out FILE]

Runs `tinker` and `tinsmith` in turn, each measurement in a process of its own, and prints the
medians and their ratios as JSON, or writes them to a file. A ratio above 1 means that ours is
better. `--tokens` are those of a sample.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from reports import write_report

MEASURES = ("cold_start", "sampling", "round_trips", "building")
LOWER_IS_BETTER = {
    "cold_start_s",
    "cpu_ms_per_sample",
    "forward_backward_ms",
    "optim_step_ms",
    "build_datums_ms",
    "build_datums_in_a_loop_ms",
    "peak_memory_mb",
    "cold_memory_mb",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--samples", type=int, default=2000)
    options.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    options.add_argument("--tokens", type=int, default=16, help="of each sample")
    options.add_argument("--out", type=Path, help="write the result to this file")
    options.add_argument("--worker", nargs=3, metavar=("PACKAGE", "MEASURE", "PORT"))
    arguments = options.parse_args()
    if arguments.worker:
        package, measure, port = arguments.worker
        print(json.dumps(work(package, measure, f"http://127.0.0.1:{port}", arguments.samples)))
        return
    measures = [measure for measure in MEASURES if measure in arguments.measures]
    found = compare(arguments.rounds, arguments.samples, measures, arguments.tokens)
    write_report(arguments.out, found)


def compare(rounds: int, samples: int, measures: list[str], num_tokens: int) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {"tinker": {}, "tinsmith": {}}
    stub = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("client_stub.py")), str(num_tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert stub.stdout is not None
        port = stub.stdout.readline().strip()
        for _ in range(rounds):
            for measure in measures:
                for package in found:
                    for name, value in run(package, measure, port, samples).items():
                        found[package].setdefault(name, []).append(value)
    finally:
        assert stub.stdin is not None
        stub.stdin.close()
        stub.wait(10)
    medians = {
        package: {name: statistics.median(values) for name, values in numbers.items()}
        for package, numbers in found.items()
    }
    ratios = {
        name: round(
            medians["tinker"][name] / ours
            if name in LOWER_IS_BETTER
            else ours / medians["tinker"][name],
            2,
        )
        for name, ours in medians["tinsmith"].items()
    }
    return {"rounds": rounds, "medians": medians, "ours_is_better_by": ratios}


def run(package: str, measure: str, port: str, samples: int) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--samples",
        str(samples),
        "--worker",
        package,
        measure,
        port,
    ]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    elapsed = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{package} {measure} failed:\n{done.stderr[-4000:]}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if measure == "cold_start":
        # The worker ends without waiting for anything, right after its first sample.
        numbers["cold_start_s"] = elapsed
    return numbers


def work(package: str, measure: str, base_url: str, samples: int) -> dict[str, float]:
    sdk = importlib.import_module(package)
    clients = (
        sdk if hasattr(sdk, "ServiceClient") else importlib.import_module("tinsmith.client.service")
    )
    if measure == "building":
        return building(sdk)
    service = clients.ServiceClient(base_url=base_url, api_key="tml-benchmark")
    if measure == "cold_start":
        sampler = service.create_sampling_client(base_model="m")
        prompt = sdk.ModelInput.from_ints([1, 2, 3])
        sampler.sample(prompt, 1, sdk.SamplingParams(max_tokens=16)).result()
        return {"cold_memory_mb": peak_mb()}
    if measure == "sampling":
        sampler = service.create_sampling_client(base_model="m")
        return asyncio.run(sampling(sdk, sampler, samples))
    return round_trips(sdk, service.create_lora_training_client("m"))


async def sampling(sdk: Any, sampler: Any, samples: int) -> dict[str, float]:
    prompt = sdk.ModelInput.from_ints(list(range(200)))
    params = sdk.SamplingParams(max_tokens=16)
    in_flight = 500

    async def some(count: int) -> None:
        for _ in range(count):
            await sampler.sample_async(prompt, 1, params)

    await asyncio.gather(*(some(1) for _ in range(20)))
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(some(samples // in_flight) for _ in range(in_flight)))
    done = samples // in_flight * in_flight
    return {
        "samples_per_s": done / (time.perf_counter() - started),
        "cpu_ms_per_sample": (time.process_time() - cpu) * 1e3 / done,
        "peak_memory_mb": peak_mb(),
    }


def round_trips(sdk: Any, training: Any) -> dict[str, float]:
    values = lists()
    builds, passes, steps = [], [], []
    for _ in range(30):
        started = time.perf_counter()
        data = datums(sdk, values)
        builds.append(time.perf_counter() - started)
        started = time.perf_counter()
        training.forward_backward(data, "cross_entropy").result()
        passes.append(time.perf_counter() - started)
        started = time.perf_counter()
        training.optim_step(sdk.AdamParams()).result()
        steps.append(time.perf_counter() - started)
    return {
        "build_datums_in_a_loop_ms": statistics.median(builds[3:]) * 1e3,
        "forward_backward_ms": statistics.median(passes[3:]) * 1e3,
        "optim_step_ms": statistics.median(steps[3:]) * 1e3,
    }


def building(sdk: Any) -> dict[str, float]:
    values = lists()
    times = []
    for _ in range(60):
        started = time.perf_counter()
        datums(sdk, values)
        times.append(time.perf_counter() - started)
    return {"build_datums_ms": statistics.median(times) * 1e3}


def lists() -> list[tuple[list[int], list[int], list[float]]]:
    draw = random.Random(0)
    return [
        (
            [draw.randrange(100_000) for _ in range(1024)],
            [draw.randrange(100_000) for _ in range(1024)],
            [draw.random() for _ in range(1024)],
        )
        for _ in range(64)
    ]


def datums(sdk: Any, values: list[tuple[list[int], list[int], list[float]]]) -> list[Any]:
    return [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": targets, "weights": weights},
        )
        for tokens, targets, weights in values
    ]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
