"""The server under load: many clients, thousands of held polls, a steady rate of requests.

    python benchmarks/load.py [--seconds 60] [--clients 500] [--polls 4000] [--rate 1000]
                              [--beside {large,silent,flood}]

Starts a server of its own over the fake engine and drives it from this process through plain
sockets, so that the driver costs little on the cores that both share. Every client trains (a pass,
a step, a poll for each), keeps its share of the polls open for samples that take half a minute,
and shows signs of life. `--beside` adds somebody who means harm: bodies of 100 MB, answers that are
never read, or requests as fast as they can be sent. Prints as JSON what was sent, what came back,
how long each kind took, and how memory, descriptors and processor time went.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import uvloop

from load_clients import HEARTBEAT_SECONDS, SAMPLE_TOKENS, Client, Harm, Measured
from reports import write_report
from tinsmith.server.config_sources import build_config
from tinsmith.server.edge.auth import create_key
from tinsmith.server.serving import open_store

TOKEN_SECONDS = 10.0
"""A sampled token of the fake engine. It costs a timer, so few and long ones are cheap."""

REQUESTS_PER_SAMPLE = 3.0
"""One to ask, and up to two polls of at most half a minute."""

REQUESTS_PER_STEP = 4.0
SETTLE_SECONDS = 5.0
"""After the start-up, before anything is measured."""


class Server:
    """A server process over the fake engine, and what the system says about it."""

    def __init__(
        self,
        folder: Path,
        num_clients: int,
        *,
        program: Sequence[str] = ("-m", "tinsmith.cli"),
        keys: Sequence[str] | None = None,
        **settings: object,
    ) -> None:
        """`keys` are those of another server that shares the folder."""
        if keys is None:
            database = settings.get("database_url")
            keys = asyncio.run(_make_keys(folder, num_clients + 1, database))
        *self.keys, self.harmful_key = keys
        options = {
            "engine": "fake",
            "port": 0,
            "max_loaded_models": 2 * num_clients,
            "fake_token_seconds": TOKEN_SECONDS,
            "max_queued_samples": 16_384,
            **settings,
        }
        command = [sys.executable, *program, "serve", "--data-dir", str(folder)]
        for name, value in options.items():
            command += ["--set", f"{name}={value}"]
        self._start(command)

    def _start(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._folder = Path(f"/proc/{self._process.pid}")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        host, _, port = line.split()[-1].removeprefix("http://").rpartition(":")
        self.address = (host, int(port))

    def memory_mb(self) -> float:
        pages = int((self._folder / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def descriptors(self) -> int:
        return sum(1 for _ in (self._folder / "fd").iterdir())

    def cpu_seconds(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def family_seconds(self) -> float:
        """Processor time of the server and of the processes that it has started."""
        waiting, found = [self._process.pid], 0
        while waiting:
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                found += int((task / "schedstat").read_text().split()[0])
                waiting += map(int, (task / "children").read_text().split())
        return found / 1e9

    def loop_seconds(self) -> float:
        """Processor time of the main thread alone, which has the event loop."""
        return int((self._folder / "schedstat").read_text().split()[0]) / 1e9

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        """After it was killed, at the same address."""
        words = cast("list[str]", self._process.args)
        self._start([f"port={self.address[1]}" if word == "port=0" else word for word in words])

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _make_keys(folder: Path, count: int, database_url: object) -> list[str]:
    store = open_store(build_config({"data_dir": folder, "database_url": database_url}))
    try:
        made = await asyncio.gather(
            *(create_key(store, f"user-{number}", "load") for number in range(count))
        )
    finally:
        await store.close()
    return [key for key, _ in made]


async def drive(
    server: Server,
    *,
    seconds: float,
    polls: int,
    rate: float,
    token_seconds: float = TOKEN_SECONDS,
    beside: str | None = None,
    new_client: Callable[[tuple[str, int], str, Measured], Client] = Client,
    meanwhile: Coroutine[Any, Any, None] | None = None,
) -> dict[str, Any]:
    """Put a server under load and measure; `beside` names a way of harm that is done meanwhile, and
    `meanwhile` is anything else that happens from the beginning of the measuring on."""
    measured = Measured()
    clients = [new_client(server.address, key, measured) for key in server.keys]
    for start in range(0, len(clients), 50):
        await asyncio.gather(*(client.start() for client in clients[start : start + 50]))
    harm = None if beside is None else Harm(server.address, server.harmful_key, measured)
    if harm is not None:
        await harm.start()
    sample_seconds = token_seconds * SAMPLE_TOKENS
    other = polls / sample_seconds * REQUESTS_PER_SAMPLE + len(clients) * 3 / HEARTBEAT_SECONDS
    steps = max(1.0, (rate - other) / REQUESTS_PER_STEP)
    work = [client.train(len(clients) / steps) for client in clients]
    work += [client.look_around() for client in clients]
    work += [clients[index % len(clients)].roll_out(sample_seconds) for index in range(polls)]
    tasks = [asyncio.create_task(item) for item in work]
    guard = asyncio.create_task(_first_failure(tasks))
    try:
        done, _ = await asyncio.wait([guard], timeout=sample_seconds + SETTLE_SECONDS)
        if done:
            await guard  # raises what went wrong
        begun, cpu, own = time.perf_counter(), server.cpu_seconds(), time.process_time()
        measured.is_on = True
        if meanwhile is not None:
            happening = asyncio.create_task(meanwhile)
            tasks.append(happening)
        if harm is not None and beside is not None:
            ways = harm.ways()
            tasks += [asyncio.create_task(work) for work in ways.pop(beside)]
            for unused in itertools.chain.from_iterable(ways.values()):
                unused.close()
        while (elapsed := time.perf_counter() - begun) < seconds and not guard.done():
            measured.memory_mb.append(server.memory_mb())
            measured.descriptors.append(server.descriptors())
            measured.outstanding.append(measured.held_polls)
            before = time.perf_counter()
            await asyncio.sleep(min(1.0, seconds - elapsed))
            measured.lag_seconds.append(time.perf_counter() - before - min(1.0, seconds - elapsed))
        if meanwhile is not None and happening.done():
            await happening  # raises what went wrong
        measured.is_on = False
        elapsed = time.perf_counter() - begun
        cpu, own = server.cpu_seconds() - cpu, time.process_time() - own
    finally:
        for task in [guard, *tasks]:
            task.cancel()
        await asyncio.gather(guard, *tasks, return_exceptions=True)
    if guard.done() and not guard.cancelled() and (error := guard.exception()) is not None:
        measured.errors[repr(error)] += 1
    return _report(measured, elapsed, cpu, own, len(clients))


async def _first_failure(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


def _report(
    measured: Measured, elapsed: float, cpu: float, own: float, num_clients: int
) -> dict[str, Any]:
    third = max(1, len(measured.memory_mb) // 3)
    return {
        "clients": num_clients,
        "seconds": round(elapsed, 1),
        "requests_per_second": round(sum(measured.answers.values()) / elapsed, 1),
        "polls_outstanding": _spread(measured.outstanding),
        "answers": dict(sorted(measured.answers.items())),
        "errors": dict(measured.errors),
        "latency_ms": {
            kind: {
                name: round(1e3 * _quantile(values, q), 2)
                for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
            }
            for kind, values in sorted(measured.seconds.items())
            if kind != "poll"
        },
        "server_memory_mb": {
            "first_third": round(statistics.median(measured.memory_mb[:third]), 1),
            "last_third": round(statistics.median(measured.memory_mb[-third:]), 1),
        },
        "server_descriptors": _spread(measured.descriptors),
        "server_cpu_cores": round(cpu / elapsed, 2),
        "driver_cpu_cores": round(own / elapsed, 2),
        "harm": {
            f"{way} {status}": {
                "count": len(seconds),
                "p50_ms": round(1e3 * _quantile(seconds, 0.5), 1),
            }
            for (way, status), seconds in sorted(measured.harm.items())
        },
        "driver_lag_ms_p99": round(1e3 * _quantile(measured.lag_seconds, 0.99), 1),
    }


def _spread(values: list[int]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--clients", type=int, default=500)
    options.add_argument("--polls", type=int, default=4000)
    options.add_argument("--rate", type=float, default=1000.0)
    options.add_argument("--token-seconds", type=float, default=TOKEN_SECONDS)
    options.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("--beside", choices=["large", "silent", "flood"])
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinsmith-load-") as folder:
        data, pause = Path(folder) / "data", arguments.token_seconds
        settings = dict(entry.split("=", 1) for entry in arguments.set)
        server = Server(data, arguments.clients, fake_token_seconds=pause, **settings)
        try:
            found = uvloop.run(
                drive(
                    server,
                    seconds=arguments.seconds,
                    polls=arguments.polls,
                    rate=arguments.rate,
                    token_seconds=pause,
                    beside=arguments.beside,
                )
            )
        finally:
            server.stop()
    write_report(arguments.out, found)


if __name__ == "__main__":
    main()
