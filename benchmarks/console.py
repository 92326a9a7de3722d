"""What it costs that a run can be looked at: recording its curves, and tabs that are open.

    python benchmarks/console.py [--seconds 120] [--rate 1000] [--tabs 200]

A server over the fake engine takes small operations at a given rate, and records no steps in every
other quarter of a second (`console_server` starts it so). The cost is the processor time that an
operation needs more for it: what is spent on the event loop, timed there, and what a commit takes
longer for each step in it, by least squares over all commits. In runs of many thousand operations
steps are also drawn together, and move when the log is trimmed; that is done afterwards to all that
were recorded, and timed. The cost is given in percent of what an operation costs without: that of
the loop, which bounds the throughput, in percent of the loop's time, and the others in percent of
all threads' time, for a run of which nothing is drawn or moved yet and for one without an end. The
difference between the two kinds of blocks says the same as the former, with a much wider interval.

Then tabs are opened: streams of live events of a run that goes on training, five operations a
second. Their cost is the server's processor time with them less that without, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
import uvloop

from console_server import BLOCK_SECONDS
from load import Server
from load_clients import Client, Connection, Measured
from reports import write_report
from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.observing.all_steps import move_steps
from tinsmith.server.store.store import Store
from tinsmith.types.observing import MAX_STEP

NUM_CLIENTS = 50
TAB_ROUNDS = 4
TAB_OPERATIONS_PER_SECOND = 5.0
WARM_UP_SECONDS = 2.0
LONG_RUN = 2048
DRAWS = 1000
"""Of the blocks, with some twice and some not at all: how far figures vary by chance."""

COLUMNS = ("is_recording", "operations", "process", "loop", "on_loop")
Array = np.ndarray[Any, np.dtype[np.float64]]


class Trainer(Client):
    """A client that trains one model, at a given pace."""

    def __init__(self, address: tuple[str, int], key: str, measured: Measured) -> None:
        super().__init__(address, key, measured)
        self._seq_id = 0
        self._requests: list[bytes] = []

    def prepare(self, count: int) -> None:
        """Encode so many passes and steps, by turns, as the next ones."""
        for number in range(count):
            self._seq_id += 1
            self._requests.append(self._operation(self._seq_id, is_pass=number % 2 == 0))

    async def operations(self, per_second: float) -> None:
        """What was prepared, at an even pace; then the results."""
        requests, self._requests = self._requests, []
        sending, polling = await self._connection(), await self._connection()
        due = time.perf_counter()
        asked: asyncio.Queue[str] = asyncio.Queue()
        answers = asyncio.create_task(self._answers(polling, asked, len(requests)))
        for request in requests:
            promise = await self._ask(sending, "operation", request)
            await asked.put(str(promise["request_id"]))
            due += 1 / per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await answers
        sending.close()
        polling.close()

    async def _answers(self, polling: Connection, asked: asyncio.Queue[str], count: int) -> None:
        for _ in range(count):
            await self._result(polling, await asked.get())


async def train_at(server: Server, *, seconds: float, rate: float) -> None:
    """Small operations at an even pace, of which each second's are encoded before it begins."""
    trainers = await _start(server)
    per_trainer = rate / len(trainers)
    for _ in range(max(1, round(seconds))):
        for trainer in trainers:
            trainer.prepare(max(2, round(per_trainer)))
        await asyncio.gather(*(trainer.operations(per_trainer) for trainer in trainers))


def recording_cost(
    blocks: Sequence[Mapping[str, Any]], later: Mapping[str, float]
) -> dict[str, Any]:
    """What recording adds to an operation, of blocks that record and others that do not, and the
    interval in which each figure lies in 95 of 100 draws of the blocks. `later` is what is spent on
    a step afterwards, in microseconds."""
    busy = [block for block in blocks if block["operations"] > 0]
    busy = busy[round(WARM_UP_SECONDS / BLOCK_SECONDS) :]
    totals = np.array([[block[name] for name in COLUMNS] for block in busy], float)
    commits = [np.array(block["commits"], float).reshape(-1, 4) for block in busy]
    chance = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        picked = chance.integers(len(busy), size=len(busy))
        some = np.concatenate([commits[i] for i in picked])
        drawn.append(_costs(totals[picked], some, later))
    return {
        "blocks": len(busy),
        "operations_per_second": round(totals[:, 1].sum() / len(busy) / BLOCK_SECONDS),
        "ends_per_commit": round(float(np.concatenate(commits)[:, 2].mean()), 2),
        **{
            name: {
                "estimate": round(float(value), 2),
                "interval": [
                    round(float(end), 2)
                    for end in np.percentile([each[name] for each in drawn], [2.5, 97.5])
                ],
            }
            for name, value in _costs(totals, np.concatenate(commits), later).items()
        },
    }


def _costs(totals: Array, commits: Array, later: Mapping[str, float]) -> dict[str, float]:
    """In microseconds of processor time for an operation, and in percent of what it costs without.
    The columns of `totals` are `COLUMNS`, those of `commits` are a `Block`'s."""
    is_recording, operations, process, loop, on_loop = totals.T
    recorded = (is_recording * operations).sum()
    # A commit takes so much, and so much for each write, for each end, and for each step.
    causes = np.column_stack([np.ones(len(commits)), commits[:, 1:]])
    writing = float(np.linalg.lstsq(causes, commits[:, 0], rcond=None)[0][3])
    added = {
        "on_loop_us": 1e6 * on_loop.sum() / recorded,
        "writing_us": 1e6 * writing,
    }
    recording = sum(added.values())
    in_the_end = recording + sum(later.values())
    operation = 1e6 * process.sum() / operations.sum() - recording * is_recording.mean()
    loop_alone = 1e6 * (loop - on_loop).sum() / operations.sum()
    with_, without = (
        process[is_recording == kind].sum() / operations[is_recording == kind].sum()
        for kind in (1, 0)
    )
    return {
        **added,
        **later,
        "recording_us": recording,
        "operation_us": operation,
        "percent_more_on_loop": 100 * added["on_loop_us"] / loop_alone,
        "percent_more": 100 * recording / operation,
        "percent_more_in_the_end": 100 * in_the_end / operation,
        "percent_more_by_difference": 100 * (with_ / without - 1),
    }


async def later_costs(folder: Path) -> dict[str, float]:
    """What is spent on each step of a stopped server's store when runs have become long: drawing
    it together with others, and moving it out of the log. Microseconds of processor time."""
    store = Store(sqlite_url(folder / "tinsmith.db"), folder / "blobs")
    try:
        runs = await store.database.column(sa.select(schema.models.c.model_id))
        await store.database.write(_lengthen)
        num_steps = await store.steps.last_entry()
        began = time.process_time()
        for run in runs:
            await store.curves.draw(run, "operation")
        drawn = time.process_time()
        for run in runs:
            move = functools.partial(move_steps, model_id=run, first=1, last=MAX_STEP)
            await store.database.write(move)
        moved = time.process_time()
    finally:
        await store.close()
    return {
        "drawing_us": 1e6 * (drawn - began) / num_steps,
        "moving_us": 1e6 * (moved - drawn) / num_steps,
    }


def _lengthen(connection: sa.Connection) -> None:
    """Fill the log with copies of the ends that have steps, up to `LONG_RUN` of each run, in turns
    as they would come."""
    own = ("request_id", "seq_id", "entry_id")
    others = ", ".join(c.name for c in schema.operations.c if c.name not in own)
    connection.execute(
        sa.text(
            "CREATE TEMP TABLE ends AS SELECT *, row_number() OVER (PARTITION BY model_id ORDER BY "
            "seq_id) AS place, count(*) OVER (PARTITION BY model_id) AS many FROM operations "
            "WHERE entry_id IS NOT NULL"
        )
    )
    connection.execute(sa.text("DELETE FROM operations"))
    connection.execute(
        sa.text(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :long) "
            f"INSERT INTO operations (request_id, seq_id, entry_id, {others}) SELECT "
            "printf('%012d%s', row_number() OVER (ORDER BY i, model_id), model_id), i, "
            f"row_number() OVER (ORDER BY i, model_id), {others} FROM n JOIN ends "
            "ON place = 1 + i % many ORDER BY i, model_id"
        ),
        {"long": LONG_RUN},
    )


async def tabs_cost(server: Server, *, seconds: float, num_tabs: int) -> dict[str, Any]:
    (trainer, *_) = await _start(server, 1)
    shares: dict[str, list[float]] = {"with": [], "without": []}
    num_events = 0
    for _ in range(TAB_ROUNDS):
        for name in shares:
            async with _open_tabs(server, num_tabs if name == "with" else 0) as heard:
                cpu, began = server.cpu_seconds(), time.perf_counter()
                count = round(seconds * TAB_OPERATIONS_PER_SECOND)
                trainer.prepare(count)
                await trainer.operations(TAB_OPERATIONS_PER_SECOND)
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


def measure_recording(seconds: float, rate: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder:
        report = Path(folder) / "blocks.json"
        program = (str(Path(__file__).with_name("console_server.py")), str(report))
        server = Server(Path(folder), NUM_CLIENTS, program=program)
        try:
            uvloop.run(train_at(server, seconds=seconds, rate=rate))
        finally:
            server.stop()
        return recording_cost(
            orjson.loads(report.read_bytes()), uvloop.run(later_costs(Path(folder)))
        )


def measure_tabs(seconds: float, num_tabs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as folder:
        server = Server(Path(folder), 1)
        try:
            return uvloop.run(tabs_cost(server, seconds=seconds, num_tabs=num_tabs))
        finally:
            server.stop()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=120.0)
    options.add_argument("--rate", type=float, default=1000.0)
    options.add_argument("--tabs", type=int, default=200)
    options.add_argument("--tab-seconds", type=float, default=10.0)
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    found = {"recording": measure_recording(arguments.seconds, arguments.rate)}
    print("recording", found["recording"], flush=True)
    if arguments.tabs:
        found["tabs"] = measure_tabs(arguments.tab_seconds, arguments.tabs)
        print("tabs", found["tabs"], flush=True)
    write_report(arguments.out, found)


if __name__ == "__main__":
    main()
