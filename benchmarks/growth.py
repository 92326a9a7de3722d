"""How time and memory grow with what users give: tokens, adapters, context, requests, runs.

    python benchmarks/growth.py [--only tokens adapters …] [--out FILE]

Each curve doubles one quantity and keeps the others. Beside its points stands the exponent of
the best-fitting power (the slope of the line on log-log paper): 1 is linear, below it better.
The engine's curves are SmolLM2-135M's on the CPU, the server's those of the fake engine. Memory
is what the process's high-water mark rose by over what it was before the curve's first point.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyqwest import Client, HTTPTransport

from reports import write_report
from server_overhead import new_model, poster
from serving import Server, serve
from trainers import Ours, make_data

Points = Iterator[tuple[int, float, float]]
"""Size, seconds, megabytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(CURVES), default=tuple(CURVES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--curve", choices=tuple(CURVES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.curve:
        for size, seconds, megabytes in CURVES[arguments.curve]():
            print(size, seconds, megabytes, flush=True)
        return
    result = {name: curve(name) for name in arguments.only}
    for name, found in result.items():
        print(f"{name:10} time ~ n^{found['time_exponent']}, memory ~ n^{found['memory_exponent']}")
    write_report(arguments.out, result)


def curve(name: str) -> dict[str, Any]:
    """A curve from a process of its own, so that no other's memory is counted."""
    command = [sys.executable, __file__, "--curve", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    sizes = [int(row[0]) for row in rows]
    seconds, megabytes = ([float(row[column]) for row in rows] for column in (1, 2))
    return {
        "sizes": sizes,
        "seconds": [round(value, 4) for value in seconds],
        "megabytes": [round(value, 1) for value in megabytes],
        "time_exponent": exponent(sizes, seconds),
        "memory_exponent": exponent(sizes, megabytes),
    }


def exponent(sizes: list[int], values: list[float]) -> float | None:
    """Least squares on logarithms; None if there is nothing to fit, as with no growth at all."""
    points = [(math.log(s), math.log(v)) for s, v in zip(sizes, values, strict=True) if v > 0.5e-3]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return round(above / sum((x - mean_x) ** 2 for x, _ in points), 2)


def tokens() -> Points:
    """One pass over more and more sequences of 64 tokens."""
    yield from training(lambda ours, size: {"0": make_data([64] * (size // 64), ours.vocab_size)})


def context() -> Points:
    """One pass over one longer and longer sequence."""
    yield from training(lambda ours, size: {"0": make_data([size], ours.vocab_size)})


def training(make: Callable[[Ours, int], dict[str, Any]]) -> Points:
    ours = Ours(torch.device("cpu"), None)
    ours.add_adapters(1)
    ours.forward_backward(make(ours, 64))
    before = peak_mb()
    for size in (256, 512, 1024, 2048, 4096):
        data = make(ours, size)
        seconds = min(timed(partial(ours.forward_backward, data)) for _ in range(2))
        yield size, seconds, peak_mb() - before


def adapters() -> Points:
    """One co-batched pass of 32 tokens for each of more and more adapters."""
    ours = Ours(torch.device("cpu"), None)
    before = peak_mb()
    for size in (1, 2, 4, 8, 16, 32, 64):
        data = {name: make_data([32], ours.vocab_size) for name in ours.add_adapters(size)}
        seconds = min(timed(partial(ours.forward_backward, data)) for _ in range(2))
        yield size, seconds, peak_mb() - before


def requests() -> Points:
    """Steps that wait for an earlier one; the time is that to carry them all out once it came."""
    for size in (256, 512, 1024, 2048, 4096):
        with serve("--engine", "fake") as server:
            yield size, *asyncio.run(held_back(server, size))


async def held_back(server: Server, size: int) -> tuple[float, float]:
    async with HTTPTransport() as transport:
        post = poster(Client(transport), server)
        model_id = await new_model(post)

        async def step(seq_id: int) -> str:
            body = {"model_id": model_id, "adam_params": {"learning_rate": 1e-4}, "seq_id": seq_id}
            return str((await post("/api/v1/optim_step", body))["request_id"])

        before = server.memory_mb()
        for start in range(2, size + 2, 64):
            last = (await asyncio.gather(*(step(start + n) for n in range(64))))[-1]
        grown = server.memory_mb() - before
        started = time.perf_counter()
        await step(1)
        while (await post("/api/v1/retrieve_future", {"request_id": last})).get("type"):
            pass
        return time.perf_counter() - started, grown


def runs() -> Points:
    """Models that were made one day; the time is that of starting the server over them."""
    for size in (64, 128, 256, 512, 1024):
        with tempfile.TemporaryDirectory() as folder:
            with serve("--engine", "fake", data_dir=folder) as server:
                asyncio.run(make_runs(server, size))
            with serve("--engine", "fake", data_dir=folder) as server:
                yield size, server.ready_after, server.memory_mb()


async def make_runs(server: Server, size: int) -> None:
    async with HTTPTransport() as transport:
        post = poster(Client(transport), server)
        for _ in range(0, size, 16):
            await asyncio.gather(*(new_model(post) for _ in range(16)))


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


CURVES: dict[str, Callable[[], Points]] = {
    "tokens": tokens,
    "context": context,
    "adapters": adapters,
    "requests": requests,
    "runs": runs,
}

if __name__ == "__main__":
    main()
