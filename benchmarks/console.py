"""What it costs that a run can be looked at: recording its curves, and tabs that are open.

    python benchmarks/console.py [--seconds 4] [--rounds 12] [--rate 1000] [--tabs 200]

Two servers over the fake engine take the same small operations at the same rate in turns, round by
round; one of them records no steps (this file starts it, with what records them taken out). The
cost is the server's processor time for an operation, with recording over without: that of the
event loop's thread, which bounds the throughput, and that of all threads together, of which the
store's writes in SQLite go on beside the loop. The figures are medians over pairs of rounds.

Then tabs are opened: streams of live events of a run that goes on training, five operations a
second. Their cost is the server's processor time with them less that without, again in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from load import Client, Connection, Measured, Server
from reports import write_report

NUM_CLIENTS = 50
TAB_ROUNDS = 4
TAB_OPERATIONS_PER_SECOND = 5.0
_FORGETFUL = "--serve-without-recording"


@dataclass(frozen=True, slots=True)
class Round:
    """What was done, and the server's processor time for an operation."""

    per_second: float
    cpu_ms: float
    """Of all threads: the store writes in one of its own."""

    loop_ms: float
    """Of the thread with the event loop, which is what bounds the throughput."""


class Trainer(Client):
    """A client that trains one model, at a given pace."""

    def __init__(self, address: tuple[str, int], key: str, measured: Measured) -> None:
        super().__init__(address, key, measured)
        self._seq_id = 0

    async def operations(self, count: int, per_second: float) -> None:
        """So many passes and steps, by turns, at an even pace; then their results."""
        sending, polling = await self._connection(), await self._connection()
        due = time.perf_counter()
        asked: asyncio.Queue[str] = asyncio.Queue()
        answers = asyncio.create_task(self._answers(polling, asked, count))
        for number in range(count):
            self._seq_id += 1
            await asked.put(await self._submit(sending, self._seq_id, is_pass=number % 2 == 0))
            due += 1 / per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await answers
        sending.close()
        polling.close()

    async def _answers(self, polling: Connection, asked: asyncio.Queue[str], count: int) -> None:
        for _ in range(count):
            await self._result(polling, await asked.get())


async def recording_cost(
    recording: Server, forgetful: Server, *, seconds: float, rounds: int, rate: float
) -> dict[str, Any]:
    servers = {"with": recording, "without": forgetful}
    trainers = {name: await _start(server) for name, server in servers.items()}
    found: dict[str, list[Round]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name in sorted(servers, reverse=number % 2 == 0):
            measured = await _round(servers[name], trainers[name], seconds, rate)
            if number > 0:  # the first round warms up
                found[name].append(measured)
    return {
        "operations_per_second": round(
            statistics.median(r.per_second for r in itertools.chain(*found.values()))
        ),
        "loop": _compared(found, lambda r: r.loop_ms),
        "all_threads": _compared(found, lambda r: r.cpu_ms),
        "rounds": rounds,
    }


def _compared(found: dict[str, list[Round]], read: Callable[[Round], float]) -> dict[str, Any]:
    costs = {name: [read(each) for each in rounds] for name, rounds in found.items()}
    pairs = zip(costs["with"], costs["without"], strict=True)
    more = statistics.quantiles([100 * (one / other - 1) for one, other in pairs], n=4)
    medians = {f"{name}_ms": round(statistics.median(each), 4) for name, each in costs.items()}
    return {
        **medians,
        "percent_more": round(more[1], 2),
        "percent_more_quartiles": [round(more[0], 2), round(more[2], 2)],
    }


async def tabs_cost(server: Server, *, seconds: float, num_tabs: int) -> dict[str, Any]:
    (trainer, *_) = await _start(server, 1)
    shares: dict[str, list[float]] = {"with": [], "without": []}
    num_events = 0
    for _ in range(TAB_ROUNDS):
        for name in shares:
            async with _open_tabs(server, num_tabs if name == "with" else 0) as heard:
                cpu, began = server.cpu_seconds(), time.perf_counter()
                count = round(seconds * TAB_OPERATIONS_PER_SECOND)
                await trainer.operations(count, TAB_OPERATIONS_PER_SECOND)
                elapsed = time.perf_counter() - began
                shares[name].append((server.cpu_seconds() - cpu) / elapsed)
            num_events += sum(heard)
    return {
        "tabs": num_tabs,
        "events_per_second_and_tab": round(
            num_events / num_tabs / TAB_ROUNDS / seconds if num_tabs else 0.0, 1
        ),
        "cores": round(statistics.median(shares["with"]) - statistics.median(shares["without"]), 4),
    }


async def _start(server: Server, count: int = NUM_CLIENTS) -> list[Trainer]:
    trainers = [Trainer(server.address, key, Measured()) for key in server.keys[:count]]
    await asyncio.gather(*(trainer.start() for trainer in trainers))
    return trainers


async def _round(server: Server, trainers: list[Trainer], seconds: float, rate: float) -> Round:
    per_trainer = rate / len(trainers)
    count = max(2, round(seconds * per_trainer))
    began, cpu, loop = time.perf_counter(), server.cpu_seconds(), server.loop_seconds()
    await asyncio.gather(*(trainer.operations(count, per_trainer) for trainer in trainers))
    total = count * len(trainers)
    return Round(
        per_second=total / (time.perf_counter() - began),
        cpu_ms=1e3 * (server.cpu_seconds() - cpu) / total,
        loop_ms=1e3 * (server.loop_seconds() - loop) / total,
    )


@contextlib.asynccontextmanager
async def _open_tabs(server: Server, count: int) -> AsyncIterator[list[int]]:
    """Streams that are read to their end; the events that each of them heard."""
    heard = [0] * count
    head = (
        "GET /api/v1/console/events HTTP/1.1\r\nhost: load\r\naccept: text/event-stream\r\n"
        f"x-api-key: {server.keys[0]}\r\n\r\n"
    )
    is_open = [asyncio.Event() for _ in range(count)]

    async def read(number: int) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        try:
            writer.write(head.encode())
            while data := await reader.read(65536):
                is_open[number].set()
                heard[number] += data.count(b"\nevent: ") + data.startswith(b"event: ")
        finally:
            writer.close()

    tabs = [asyncio.create_task(read(number)) for number in range(count)]
    await asyncio.gather(*(each.wait() for each in is_open))
    try:
        yield heard
    finally:
        for tab in tabs:
            tab.cancel()
        await asyncio.gather(*tabs, return_exceptions=True)


async def measure(recording: Server, forgetful: Server, options: Any) -> dict[str, Any]:
    result = {
        "recording": await recording_cost(
            recording,
            forgetful,
            seconds=options.seconds,
            rounds=options.rounds,
            rate=options.rate,
        ),
        "tabs": await tabs_cost(recording, seconds=10.0, num_tabs=options.tabs),
    }
    for what, figures in result.items():
        print(f"{what:10}", figures)
    return result


def serve_without_recording(arguments: list[str]) -> None:
    """`tinsmith serve` whose operations end without a step for the curves."""
    from tinsmith.cli.__main__ import main as command
    from tinsmith.server.operations import finishes

    finishes._step = lambda *_, **__: None  # type: ignore[assignment]  # no setting turns it off
    finishes.observed = lambda item, output: {}
    command(arguments)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--rate", type=float, default=1000.0)
    options.add_argument("--tabs", type=int, default=200)
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder:
        recording = Server(Path(folder, "recording"), NUM_CLIENTS)
        forgetful = Server(Path(folder, "forgetful"), NUM_CLIENTS, program=(__file__, _FORGETFUL))
        try:
            found = uvloop.run(measure(recording, forgetful, arguments))
        finally:
            recording.stop()
            forgetful.stop()
    write_report(arguments.out, found)


if __name__ == "__main__":
    if sys.argv[1:2] == [_FORGETFUL]:
        serve_without_recording(sys.argv[2:])
    else:
        main()
