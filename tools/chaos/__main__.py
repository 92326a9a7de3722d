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
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import invariants
import sqlalchemy
import tiny_model
from machinery import (
    RANK,
    ObjectStorage,
    Postgres,
    Server,
    SmallDisk,
    children,
    clean_environment,
    orphans,
    resident_bytes,
)
from places import ByHand, OnRay, WithTheServer
from proxy import FaultProxy

from history.calls import Recorder
from history.checker import violations
from history.listening import Exchange, Listener

PROGRAMS = ("sft", "rl", "resume", "custom", "pipelined", "gaps")
PACKAGES = ("tinker", "tinsmith")
STEPS = 12
"""Of a client; with more of them less of the run is spent on starting clients."""
CLIENT_SECONDS = 300.0
"""Most time for a client of that many steps."""
LOOP_STEPS = 60
MAX_GROWTH_BYTES = 16 * 1024 * 1024
"""What a loop may add to the engine's memory; each of its samplers has a quarter of a MiB."""
CACHE_BYTES = 4 * 1024 * 1024
"""For copies of what is in object storage: so few that they make room for each other."""
BUCKET = "s3://bucket/chaos"
DISK_BYTES = 128 * 1024 * 1024
"""The data folder's disk, and as much again for each minute: clients leave checkpoints behind."""


class Chaos:
    def __init__(
        self,
        seed: int,
        store: str,
        folder: Path,
        model: Path | None,
        disk_bytes: int,
        num_engines: int,
        num_ranks: int,
        steps: int = STEPS,
        num_replicas: int = 1,
        cluster: str = "none",
        storage: str = "folder",
    ) -> None:
        self.chance = random.Random(seed)
        self._steps = steps
        self._client_seconds = CLIENT_SECONDS * max(1.0, steps / STEPS)
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.disk = SmallDisk(folder / "disk", disk_bytes)
        self.postgres = Postgres() if store == "postgres" else None
        options = ["--ranks", str(num_ranks)]
        if self.postgres is not None:
            self.postgres.start()
            options += ["--database-url", self.postgres.url]
        if model is None:
            model = folder / "tiny"
            tiny_model.build(model)
        self.data = self.disk.folder / "data"
        self.objects = ObjectStorage(folder / "s3") if storage == "s3" else None
        self.bucket = self.objects.folder(BUCKET) if self.objects is not None else None
        self._storage_options: list[str] = []
        if self.objects is not None:
            self._storage_options = ["--storage", BUCKET]
            self._storage_options += ["--set", f"storage_cache_bytes={CACHE_BYTES}"]
            options += self._storage_options
            self.objects.start()
            self.storage_proxy = FaultProxy([self.objects.port], random.Random(seed + 3))
        self._older = folder / "older.db"
        self.place = self._place(cluster, num_engines, random.Random(seed + 2))
        options += self.place.options
        self.servers = [
            Server(folder, self.data, model, self.mark, num_engines, *options)
            for _ in range(num_replicas)
        ]
        for server in self.servers:
            server.variables |= self.place.variables
        self.server = self.servers[0]
        self.history = Recorder()
        self.proxy = FaultProxy(
            [server.port for server in self.servers],
            random.Random(seed + 1),
            lambda: Listener(self._hear),
        )
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.expected: dict[str, list[str]] = {}
        self.weights_of: dict[str, str] = {}
        """The program and seed that a model belongs to, for models that reached their end."""
        self.finished: set[str] = set()
        """The models of clients that reached their end."""
        self.damaged: dict[str, str] = {}
        """Models of which a snapshot was damaged, and which."""
        self._stop_at = math.inf
        self.running: dict[asyncio.subprocess.Process, bool] = {}
        """Clients under way, and whether each has been killed."""

    @property
    def store_url(self) -> str:
        if self.postgres is not None:
            return self.postgres.url
        return f"sqlite:///{self.data / 'tinsmith.db'}"

    def _place(self, cluster: str, num_engines: int, chance: random.Random) -> WithTheServer:
        if cluster == "tcp":
            return ByHand(self.data, num_engines, chance, self.mark)
        if cluster == "ray":
            return OnRay(lambda: self.servers, chance, self.mark)
        return WithTheServer()

    async def run(
        self, seconds: float, max_operations: float, num_clients: int, *, watches_memory: bool
    ) -> None:
        await self.place.start()
        if self.objects is not None:
            await self.storage_proxy.start()
            for server in self.servers:
                server.variables |= self.objects.environment(self.storage_proxy.port)
        await self._start_all()
        await self.proxy.start()
        jobs = [(package, program) for program in PROGRAMS for package in PACKAGES]
        programs = [jobs[index % len(jobs)] for index in range(num_clients)]
        await asyncio.gather(*[self._client(p, "tinker", 7, is_reference=True) for p in PROGRAMS])
        if self.problems:
            return
        self._stop_at = time.monotonic() + seconds
        rounds = [self._rounds(index, programs) for index in range(num_clients)]
        counting = asyncio.create_task(self._count_operations(max_operations))
        breaking = asyncio.create_task(self._break())
        await asyncio.gather(*rounds)
        await breaking
        counting.cancel()
        if watches_memory:
            await self._watch_memory()
        for server in self.servers:
            code = await server.stop()
            if code != 0:
                self.problems.append(f"a server ended with {code}")
        # What was in doubt when a connection or a process died is cleared away by the next start.
        await self.server.start()
        await self.server.stop()
        await self.place.close()
        self._check()

    # Servers

    async def _start_all(self) -> None:
        """Those that do not run; the first of all makes the key."""
        for server in self.servers:
            if server.process is None or server.process.poll() is not None:
                await server.start()

    async def _kill_all(self) -> None:
        for server in self.servers:
            await server.kill()

    def _some_server(self) -> Server:
        return self.server if len(self.servers) == 1 else self.chance.choice(self.servers)

    def _engines(self) -> list[int]:
        return sorted({pid for server in self.servers for pid in self.place.engines(server)})

    def _ranks(self) -> list[int]:
        """The engine processes, and those that have models together with them."""
        engines = self._engines()
        return [*engines, *(rank for engine in engines for rank in children(engine, RANK))]

    # Clients

    def _is_over(self) -> bool:
        return time.monotonic() >= self._stop_at

    async def _count_operations(self, max_operations: float) -> None:
        """End the run when so many have been carried out. Looks seldom: it disturbs the store."""
        while True:
            await asyncio.sleep(5.0)
            with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
                if await asyncio.to_thread(invariants.num_done, self.store_url) >= max_operations:
                    self._stop_at = time.monotonic()
                    return

    async def _rounds(self, index: int, programs: list[tuple[str, str]]) -> None:
        number = index
        while not self._is_over():
            package, program = programs[number % len(programs)]
            await self._client(program, package, 7)
            number += 1

    async def _client(
        self, program: str, package: str, seed: int, *, is_reference: bool = False
    ) -> None:
        process = await self._start_client(self.proxy.port, package, program, seed, self._steps)
        self.running[process] = False
        try:
            async with asyncio.timeout(self._client_seconds):
                out, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            out, errors = await process.communicate()
            self.problems.append(f"{package} {program} did not end in {self._client_seconds:g} s")
        was_dropped = self.running.pop(process)
        lines = out.decode().splitlines()
        models = [line.split()[1] for line in lines if line.startswith("run ")]
        results = [line for line in lines if not line.startswith("run ")]
        # The official client's process sometimes aborts on its way out, with all its work done.
        is_complete = results[-1:] == ["end"]
        if is_reference and is_complete:
            self.expected[program] = results
            self.weights_of[models[-1]] = program
            self.finished.update(models)
        elif was_dropped:
            self._compare(program, package, results, self.expected[program][: len(results)])
        elif not is_complete:
            tail = errors.decode()[-1500:]
            self.problems.append(f"{package} {program} ended with {process.returncode}: {tail}")
        else:
            self.counts["clients done"] += 1
            self.finished.update(models)
            self.weights_of[models[-1]] = program
            self._compare(program, package, results, self.expected[program])

    async def _start_client(
        self, port: int, package: str, program: str, seed: int, steps: int
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(Path(__file__).with_name("client.py")), package, program, str(seed), str(steps)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **clean_environment(),
                "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
                "TINKER_API_KEY": self.server.key,
                "TINKER_TELEMETRY": "0",
            },
        )

    async def _watch_memory(self) -> None:
        """The engines are as large after a second loop of samplers as they were after the first;
        of loops there are as many at a time as engines. Those of the first round, with several
        engines, do not count: not each has an engine for itself."""
        sizes = []
        for _ in range(2 if self.server.num_engines == 1 else 3):
            loops = [self._loop() for _ in range(self.server.num_engines)]
            if not all(await asyncio.gather(*loops)):
                return
            sizes.append(sum(map(resident_bytes, self._engines())))
        self.counts["engine's MiB after a loop"] = sizes[-2] >> 20
        self.counts["engine's MiB after two loops"] = sizes[-1] >> 20
        if sizes[-1] - sizes[-2] > MAX_GROWTH_BYTES * self.server.num_engines:
            self.problems.append(f"a loop of {LOOP_STEPS} samplers takes memory: {sizes}")

    async def _loop(self) -> bool:
        """Whether a loop of samplers came to its end."""
        process = await self._start_client(self.server.port, PACKAGES[0], "loop", 7, LOOP_STEPS)
        out, errors = await process.communicate()
        if out.endswith(b"end\n"):
            return True
        self.problems.append(f"the loop of samplers ended: {errors.decode()[-1500:]}")
        return False

    def _compare(self, program: str, package: str, results: list[str], expected: list[str]) -> None:
        self.counts["results compared"] += len(results)
        if results != expected:
            pairs = zip(results, expected, strict=False)
            first = next((p for p in pairs if p[0] != p[1]), ("a missing line", ""))
            self.problems.append(f"{package} {program} got {first[0]!r}, not {first[1]!r}")

    # Faults

    async def _break(self) -> None:
        faults: list[tuple[str, int, Callable[[], Coroutine[Any, Any, None]]]] = [
            ("server killed", 4, self._kill_server),
            ("server killed twice", 1, self._kill_server_twice),
            ("snapshot damaged", 2, self._damage_snapshot),
            ("engine killed", 5, self._kill_engine),
            ("server stopped", 2, self._stop_server),
            ("engine stopped", 2, self._stop_engine),
            ("connections cut", 5, self._cut),
            ("connections delayed", 2, self._delay),
            ("connections refused", 2, self._refuse),
            ("client killed", 1, self._kill_client),
            ("clock set", 4, self._set_clock),
            ("another store tried", 2, self._try_other_stores),
        ]
        faults += self.place.faults()
        if self.server.num_engines > 1:
            faults.append(("slot emptied", 2, self._empty_slot))
            faults.append(("models moved", 4, self._move_models))
        if self.disk.is_small:
            faults.append(("disk filled", 3, self._fill_disk))
        if self.objects is not None:
            faults.append(("storage cut", 4, self._cut_storage))
            faults.append(("storage refused", 3, self._refuse_storage))
            faults.append(("storage silent", 2, self._silence_storage))
            faults.append(("copies lost", 2, self._lose_copies))
        if self.postgres is not None:
            faults.append(("database killed", 4, self._kill_database))
            faults.append(("database stopped", 2, self._stop_database))
        else:
            faults.append(("database locked", 3, self._lock_database))
        names = [name for name, weight, _ in faults for _ in range(weight)]
        actions = {name: action for name, _, action in faults}
        # However short the run and slow the machine, one death is part of it.
        name = "server killed"
        while not self._is_over():
            await asyncio.sleep(self.chance.uniform(0.3, 4.0))
            if self._is_over():
                return
            self.counts[name] += 1
            print(f"{self._stop_at - time.monotonic():7.1f} s left: {name}", flush=True)
            await actions[name]()
            name = self.chance.choice(names)

    async def _kill_server(self) -> None:
        server = self._some_server()
        await server.kill()
        await asyncio.sleep(self.chance.uniform(0.0, 1.0))
        await server.start()

    async def _kill_server_twice(self) -> None:
        """The second time while it starts."""
        server = self._some_server()
        await server.kill()
        server.spawn()
        await asyncio.sleep(self.chance.uniform(0.2, 3.0))
        await server.kill()
        await server.start()

    async def _damage_snapshot(self) -> None:
        """Flip a bit in the newest snapshot of a model, once for each: it has two at a time."""
        await self._kill_all()
        tables = invariants.read(self.store_url)
        newest = {
            row["model_id"]: row["snapshot_weights_id"]
            for row in tables["models"]
            if row["snapshot_weights_id"] != row["previous_snapshot_weights_id"]
        }
        pending = {row["model_id"] for row in tables["operations"] if row["status"] == "pending"}
        # Those with something to do are certain to be rebuilt.
        candidates = sorted((newest.keys() & pending) - self.damaged.keys())
        if candidates:
            model_id = self.chance.choice(candidates)
            self.damaged[model_id] = newest[model_id]
            folder = (self.bucket or self.data) / "weights" / newest[model_id]
            file = self.chance.choice(sorted(f for f in folder.iterdir() if f.stat().st_size))
            content = bytearray(file.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            file.write_bytes(content)
            shutil.rmtree(self.data / "cache" / newest[model_id], ignore_errors=True)
            self.counts["snapshots with a flipped bit"] += 1
        await self._start_all()

    async def _kill_engine(self) -> None:
        pid = self._some_engine()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.counts["engines that died"] += 1

    def _some_engine(self) -> int | None:
        processes = self._ranks()
        return self.chance.choice(processes) if processes else None

    async def _empty_slot(self) -> None:
        slot = self.chance.randrange(self.server.num_engines)
        await asyncio.to_thread(self.server.cluster, "drain", slot)
        await asyncio.sleep(self.chance.uniform(0.5, 4.0))
        await asyncio.to_thread(self.server.cluster, "resume", slot)

    async def _move_models(self) -> None:
        """Those that have something to do."""
        with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
            tables = await asyncio.to_thread(invariants.read, self.store_url)
            pending = {o["model_id"] for o in tables["operations"] if o["status"] == "pending"}
            for model_id in sorted(pending):
                slot = self.chance.randrange(self.server.num_engines)
                is_moved = await asyncio.to_thread(self.server.move, model_id, slot)
                self.counts["moves accepted"] += is_moved

    async def _set_clock(self) -> None:
        """By an hour or by a day, to and fro; half of the time somebody sets it right again."""
        self.server.set_clock(self.chance.choice([-3600.0, 0.0, 0.0, 3600.0, 86400.0]))

    async def _try_other_stores(self) -> None:
        """A new database, and one as it was when this was last tried: both are refused."""
        await self._kill_all()
        if self.postgres is None:
            strangers = [f"sqlite:///{self.folder / uuid.uuid4().hex}.db"]
            strangers += [f"sqlite:///{self._older}"] if self._older.exists() else []
        else:
            strangers = [self.postgres.create_database(f"new_{self.counts['stores refused']}")]
        before = _files(self.bucket or self.data)
        for url in strangers:
            code, said = await asyncio.to_thread(
                self.server.start_with, url, *self._storage_options
            )
            self.counts["stores refused"] += 1
            if code == 0 or "do not belong together" not in said:
                self.problems.append(f"{url} was not refused ({code}): {said[-500:]}")
        after = _files(self.bucket or self.data)
        # An upload that was under way when its server was killed may still have arrived.
        if after != before if self.bucket is None else not before.items() <= after.items():
            self.problems.append("a start with another store changed the data folder or storage")
        if self.postgres is None:
            _copy(self.data / "tinsmith.db", self._older)
        await self._start_all()

    async def _stop_server(self) -> None:
        """With others beside it sometimes for longer than they wait."""
        server = self._some_server()
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.5, 4.0 if len(self.servers) == 1 else 9.0))
        server.signal(signal.SIGCONT)

    async def _stop_engine(self) -> None:
        """Sometimes for longer than a server waits for a sign of life."""
        seconds = self.chance.choice([1.0, 3.0, 9.0])
        pid = self._some_engine()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            finally:
                os.close(handle)

    async def _fill_disk(self) -> None:
        await asyncio.to_thread(self.disk.fill)
        await asyncio.sleep(self.chance.uniform(0.5, 4.0))
        self.disk.free()

    async def _stop_database(self) -> None:
        """It is there and does not answer."""
        assert self.postgres is not None
        self.postgres.signal(signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.5, 4.0))
        self.postgres.signal(signal.SIGCONT)

    async def _lock_database(self) -> None:
        """Somebody else writes into the file for long."""
        database = sqlite3.connect(self.data / "tinsmith.db", timeout=10, isolation_level=None)
        try:
            with contextlib.suppress(sqlite3.OperationalError):
                database.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(self.chance.uniform(0.5, 4.0))
        finally:
            database.close()

    async def _kill_database(self) -> None:
        assert self.postgres is not None
        await asyncio.to_thread(self.postgres.stop)
        await asyncio.sleep(self.chance.uniform(0.0, 3.0))
        await asyncio.to_thread(self.postgres.start)

    async def _cut_storage(self) -> None:
        number = self.storage_proxy.cut(self.chance.uniform(0.2, 1.0))
        self.counts["connections to the storage that were cut"] += number

    async def _refuse_storage(self) -> None:
        self.storage_proxy.is_refusing = True
        self.storage_proxy.cut()
        await asyncio.sleep(self.chance.uniform(0.3, 5.0))
        self.storage_proxy.is_refusing = False

    async def _silence_storage(self) -> None:
        self.storage_proxy.is_silent = True
        await asyncio.sleep(self.chance.uniform(0.5, 8.0))
        self.storage_proxy.is_silent = False

    async def _lose_copies(self) -> None:
        """The servers go on on machines that have none."""
        await self._kill_all()
        shutil.rmtree(self.data / "cache")
        await self._start_all()

    async def _cut(self) -> None:
        self.counts["connections that were cut"] += self.proxy.cut(self.chance.uniform(0.2, 1.0))

    async def _delay(self) -> None:
        self.proxy.delay_seconds = self.chance.uniform(0.05, 0.5)
        await asyncio.sleep(self.chance.uniform(1.0, 3.0))
        self.proxy.delay_seconds = 0.0

    async def _refuse(self) -> None:
        self.proxy.is_refusing = True
        self.proxy.cut()
        await asyncio.sleep(self.chance.uniform(0.3, 2.0))
        self.proxy.is_refusing = False

    async def _kill_client(self) -> None:
        alive = [p for p, is_dropped in self.running.items() if not is_dropped]
        if alive:
            chosen = self.chance.choice(alive)
            self.running[chosen] = True
            chosen.kill()

    # The end

    def _hear(self, exchange: Exchange) -> None:
        try:
            self.history.hear(exchange)
        except Exception as error:
            self.problems.append(f"{exchange.request.path} cannot be written down: {error!r}")

    def _check(self) -> None:
        self.problems += violations(self.history.calls)
        self.counts["calls in the history"] = len(self.history.calls)
        tables = invariants.read(self.store_url)
        self.problems += invariants.violations(
            tables, self.data, self.bucket, self.finished, self.damaged.values()
        )
        checksums = invariants.final_checksums(tables, self.bucket or self.data)
        by_program: dict[str, set[str]] = collections.defaultdict(set)
        for model_id, program in self.weights_of.items():
            by_program[program].add(json.dumps(checksums[model_id], sort_keys=True))
            self.counts["final weights compared"] += 1
        for program, found in by_program.items():
            if len(found) != 1:
                self.problems.append(f"{program} ended with {len(found)} different weights")
        if left := orphans(self.mark):
            self.problems.append(f"processes {left} are still there")
        self.counts["operations carried out"] = sum(
            row["status"] == "done" for row in tables["operations"]
        )

    async def close(self) -> None:
        await self.proxy.close()
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                await server.kill()
        await self.place.close()
        if self.postgres is not None:
            self.postgres.close()
        if self.objects is not None:
            await self.storage_proxy.close()
            self.objects.close()
        self.disk.close()


def _files(folder: Path) -> dict[str, int]:
    """The weights, requests and results in a data folder, with their sizes."""
    parts = [folder / name for name in ("weights", "blobs", "trash", "identity.json")]
    found = [f for part in parts for f in (part, *part.rglob("*")) if f.is_file()]
    return {str(file): file.stat().st_size for file in found}


def _copy(database: Path, target: Path) -> None:
    """A whole copy of a database, as a backup would make it."""
    target.unlink(missing_ok=True)
    with (
        contextlib.closing(sqlite3.connect(database, timeout=30)) as now,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        now.backup(copy)


async def _main(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-chaos-"))
    disk_bytes = round((1 + arguments.minutes) * DISK_BYTES)
    chaos = Chaos(
        arguments.seed,
        arguments.store,
        folder,
        arguments.model,
        disk_bytes,
        arguments.engines,
        arguments.ranks,
        arguments.steps,
        arguments.replicas,
        arguments.cluster,
        arguments.storage,
    )
    try:
        await chaos.run(
            arguments.minutes * 60,
            arguments.operations,
            arguments.clients,
            watches_memory=arguments.memory,
        )
    finally:
        await chaos.close()
    took = (time.monotonic() - began) / 60
    where = f"store {arguments.store}, storage {arguments.storage}"
    print(f"seed {arguments.seed}, {where}, {took:.1f} minutes")
    for name, count in sorted(chaos.counts.items()):
        print(f"{count:7d} {name}")
    for problem in chaos.problems:
        print("PROBLEM", problem)
    print("nothing was lost" if not chaos.problems else f"the log is {chaos.server.log}")
    return 1 if chaos.problems else 0


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
