"""Break everything, again and again, while clients train; then look whether anything was lost.

    python tools/chaos --seed 1 --minutes 30 [--operations 10000] [--store sqlite|postgres]
                       [--clients 6] [--steps 12] [--engines 2] [--ranks 1] [--replicas 1]
                       [--cluster none|tcp|ray] [--storage folder|s3]

It ends after the minutes, or as soon as so many operations have been carried out.

Several official clients and several of ours train against one server, or several that share a
Postgres, through a proxy. A driver kills and stops the server, its engines and their ranks, empties
their slots, moves models between them, starts it with stores that are not its own, sets its clock,
fills the disk, stops the database, cuts, delays and refuses connections and kills clients; which,
in which order and for how long the seed decides. Engines may be elsewhere: behind a network that
drops and delays, or on a Ray cluster that loses nodes, raylets, its head and the placer (`places`).
Weights, requests and results may be in object storage, whose connections are cut, refused and
silenced, and of which the machine's copies are lost.
Each client's output must be that of an
undisturbed run to the last bit, and so must the final weights; what clients saw, written down as it
passed, must be possible (`tools/history`); then the store and the folder are looked through, and a
long loop of samplers must not have taken memory.
Ends with 1 if anything is amiss.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import sqlalchemy

from chaos import invariants
from chaos.faults import Faults
from chaos.findings import Findings
from chaos.installation import Installation
from chaos.machinery import orphans
from chaos.rounds import PACKAGES, PROGRAMS, STEPS, Clients
from history.calls import Recorder
from history.checker import violations
from history.listening import Exchange, Listener


class Chaos:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self.findings = Findings()
        self._history = Recorder()
        self.site = Installation(arguments, folder, lambda: Listener(self._hear))
        self._clients = Clients(self.site, self.findings, arguments.steps)
        self._chance = random.Random(arguments.seed)
        self._faults = Faults(self.site, self._clients, self.findings, self._chance)
        self._stop_at = math.inf

    async def run(self) -> None:
        await self.site.start()
        await self._clients.run_undisturbed()
        if self.findings.problems:
            return
        self._stop_at = time.monotonic() + self._arguments.minutes * 60
        counting = asyncio.create_task(self._count_operations())
        breaking = asyncio.create_task(self._break())
        await asyncio.gather(*[self._rounds(index) for index in range(self._arguments.clients)])
        await breaking
        counting.cancel()
        if self._arguments.memory:
            await self._clients.watch_memory()
        for server in self.site.servers:
            code = await server.stop()
            if code != 0:
                self.findings.problems.append(f"a server ended with {code}")
        # What was in doubt when a connection or a process died is cleared away by the next start.
        await self.site.server.start()
        await self.site.server.stop()
        await self.site.place.close()
        self._check()

    def _is_over(self) -> bool:
        return time.monotonic() >= self._stop_at

    async def _count_operations(self) -> None:
        """End the run when so many have been carried out. Looks seldom: it disturbs the store."""
        while True:
            await asyncio.sleep(5.0)
            with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
                num_done = await asyncio.to_thread(invariants.num_done, self.site.store_url)
                if num_done >= self._arguments.operations:
                    self._stop_at = time.monotonic()
                    return

    async def _rounds(self, index: int) -> None:
        jobs = [(package, program) for program in PROGRAMS for package in PACKAGES]
        programs = [jobs[each % len(jobs)] for each in range(self._arguments.clients)]
        number = index
        while not self._is_over():
            package, program = programs[number % len(programs)]
            await self._clients.run(program, package)
            number += 1

    async def _break(self) -> None:
        faults = self._faults.all()
        names = [name for name, weight, _ in faults for _ in range(weight)]
        actions = {name: action for name, _, action in faults}
        # However short the run and slow the machine, one death is part of it.
        name = "server killed"
        while not self._is_over():
            await asyncio.sleep(self._chance.uniform(0.3, 4.0))
            if self._is_over():
                return
            self.findings.counts[name] += 1
            print(f"{self._stop_at - time.monotonic():7.1f} s left: {name}", flush=True)
            await actions[name]()
            name = self._chance.choice(names)

    def _hear(self, exchange: Exchange) -> None:
        try:
            self._history.hear(exchange)
        except Exception as error:
            self.findings.problems.append(
                f"{exchange.request.path} cannot be written down: {error!r}"
            )

    def _check(self) -> None:
        counts, problems = self.findings.counts, self.findings.problems
        problems += violations(self._history.calls)
        counts["calls in the history"] = len(self._history.calls)
        tables = invariants.read(self.site.store_url)
        problems += invariants.violations(
            tables,
            self.site.data,
            self.site.bucket,
            self._clients.finished,
            self._faults.damaged.values(),
        )
        checksums = invariants.final_checksums(tables, self.site.kept_in)
        by_program: dict[str, set[str]] = collections.defaultdict(set)
        for model_id, program in self._clients.weights_of.items():
            by_program[program].add(json.dumps(checksums[model_id], sort_keys=True))
            counts["final weights compared"] += 1
        for program, found in by_program.items():
            if len(found) != 1:
                problems.append(f"{program} ended with {len(found)} different weights")
        if left := orphans(self.site.mark):
            problems.append(f"processes {left} are still there")
        counts["operations carried out"] = sum(
            row["status"] == "done" for row in tables["operations"]
        )


async def _main(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    chaos = Chaos(arguments, Path(tempfile.mkdtemp(prefix="tinsmith-chaos-")))
    findings = chaos.findings
    try:
        await chaos.run()
    finally:
        await chaos.site.close()
    took = (time.monotonic() - began) / 60
    where = f"store {arguments.store}, storage {arguments.storage}"
    print(f"seed {arguments.seed}, {where}, {took:.1f} minutes")
    for name, count in sorted(findings.counts.items()):
        print(f"{count:7d} {name}")
    for problem in findings.problems:
        print("PROBLEM", problem)
    print("nothing was lost" if not findings.problems else f"the log is {chaos.site.server.log}")
    return 1 if findings.problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--operations", type=float, default=math.inf)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--steps", type=int, default=STEPS, help="how long each client trains")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="processes of each engine")
    parser.add_argument("--replicas", type=int, default=1, help="how many servers; of postgres")
    parser.add_argument(
        "--cluster",
        choices=["none", "tcp", "ray"],
        default="none",
        help="where engines are: with the server, elsewhere over a bad network, on a Ray cluster",
    )
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether loops at the end show that engines do not grow",
    )
    parser.add_argument(
        "--storage",
        choices=["folder", "s3"],
        default="folder",
        help="where weights, requests and results are; s3: served by rclone",
    )
    parser.add_argument("--model", type=Path, help="a folder with the tiny model; made if missing")
    arguments = parser.parse_args()
    if arguments.replicas > 1 and arguments.store != "postgres":
        parser.error("several servers share a Postgres: --store postgres")
    if arguments.replicas > 1 and arguments.cluster == "tcp":
        parser.error("engines that join by hand know one server: --replicas 1")
    return arguments


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_arguments())))
