"""A life: servers, clients and trouble, from the first request to the last, drawn by a seed."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

from history.calls import Call as Entry
from history.checker import violations
from tests.simulation.client import Client
from tests.simulation.database import FEW_LOST_ANSWERS, SimulatedDatabase
from tests.simulation.disk import SimulatedDisk
from tests.simulation.network import Network
from tests.simulation.processes import ProcessLoop, clock_error
from tests.simulation.programs import NUM_PROGRAMS, program
from tests.simulation.replica import SimulatedReplica
from tests.support.sequential import MODEL
from tests.support.simulated_loop import run as run_loop
from tests.support.simulated_server import simulated_machine
from tinsmith.server.config import ServerConfig
from tinsmith.server.data_folder import DataFolder
from tinsmith.server.edge.auth import create_key
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.store import Store

OWNERS = ("ann", "bob")
NUM_CLIENTS = 10
LEASE_SECONDS = 4.0
PATIENCE_SECONDS = 5000.0
"""Simulated; more than any wait here can take unless somebody is forgotten."""

_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Lived:
    num_steps: int
    num_operations: int
    """Training operations and samples, each counted once, that ended as they had to."""
    num_calls: int
    """Calls in the history that the checker has seen: what clients submitted, also again, and what
    they were told when they asked for a result, also "not yet"."""
    num_faults: int
    """What went wrong on purpose: troubles, and losses of the network and the database."""
    seconds: float
    """Simulated."""


class World:
    def __init__(self, random: random.Random, folder: Path) -> None:
        self.random = random
        self.folder = folder / "data"
        self.disk = SimulatedDisk(self.folder)
        self.network = Network(random, knowledge=random.choice((0.7, 0.95)))
        config = ServerConfig(
            data_dir=self.folder,
            fake_pass_seconds=0.02,
            hold_seconds=5.0,
            lease_seconds=LEASE_SECONDS,
            max_loaded_models=random.choice((8, 32)),
            snapshot_steps=random.choice((10, 50)),
            engine_attempts=1000,
            engines=random.choice((1, 2)),
            engine_lost_seconds=1.0,
        )
        self.database = SimulatedDatabase(random, sqlite_url(DataFolder(self.folder).database))
        self.replicas = [
            SimulatedReplica(random, name, config, MODEL, self.database, self.network)
            for name in ("east", "west", "north")[: random.choice((2, 3))]
        ]
        self.history: list[Entry] = []
        self.num_troubles = 0
        keys = _template()[1]
        programs = [random.randrange(NUM_PROGRAMS) for _ in range(3)]
        self.clients = [
            Client(
                random,
                self.network,
                keys[number % len(keys)],
                self.history,
                program(random.choice(programs)),
            )
            for number in range(NUM_CLIENTS)
        ]

    async def live(self, trouble: Trouble) -> None:
        keeping = asyncio.create_task(self._keep_running(), name="init")
        troubling = asyncio.create_task(make_trouble(self, trouble), name="trouble")
        async with asyncio.timeout(PATIENCE_SECONDS):
            async with asyncio.TaskGroup() as group:
                for client in self.clients:
                    group.create_task(client.live())
            troubling.cancel()
            await asyncio.wait([troubling])
            heal(self)
            async with asyncio.TaskGroup() as group:
                for client in self.clients:
                    group.create_task(client.check_all())
        keeping.cancel()
        await asyncio.wait([keeping])
        for replica in self.replicas:
            if not replica.process.is_dead:
                await replica.stop()
        await asyncio.sleep(100.0)  # what is still on its way arrives nowhere

    async def _keep_running(self) -> None:
        """Start what has ended."""
        while True:
            for replica in self.replicas:
                if replica.process.is_dead and self.random.random() < 0.5:
                    replica.start()
            await asyncio.sleep(1.0)

    def check(self) -> None:
        found = violations(self.history)
        assert not found, found
        with sqlite3.connect(DataFolder(self.folder).database) as connection:
            rows = connection.execute("SELECT status, COUNT(*) FROM operations GROUP BY status")
            by_status = dict(rows.fetchall())
        assert "pending" not in by_status, f"operations were forgotten: {by_status}"
        expected = sum(1 + len(client.program) for client in self.clients)
        assert sum(by_status.values()) == expected, f"{by_status} and not {expected} in all"


# Trouble


async def make_trouble(world: World, trouble: Trouble) -> None:
    mean = world.random.choice(trouble.mean_seconds)
    while True:
        await asyncio.sleep(world.random.expovariate(1 / mean))
        world.num_troubles += 1
        await world.random.choice(trouble.kinds)(world)


def heal(world: World) -> None:
    for replica in world.replicas:
        if replica.process.is_stopped and not replica.process.is_dead:
            replica.process.go_on()
    world.network.cut.clear()
    world.network.is_lossy = False
    world.database.is_away = False
    world.database.lost_answers = FEW_LOST_ANSWERS
    world.disk.is_full = False


def _victim(world: World) -> SimulatedReplica:
    """Rather the one that leads."""
    leading = [replica for replica in world.replicas if replica.leads]
    if leading and world.random.random() < 0.8:
        return world.random.choice(leading)
    return world.random.choice(world.replicas)


async def _kill(world: World) -> None:
    await _victim(world).kill()


async def _stop(world: World) -> None:
    victim = _victim(world)
    if not victim.process.is_stopped:
        await asyncio.wait_for(victim.stop(), None)


async def pause_one(world: World) -> None:
    """Often for longer than the lease lasts: another takes over, and then the first goes on."""
    victim = _victim(world)
    process = victim.process
    process.stop()
    await asyncio.sleep(LEASE_SECONDS * world.random.choice((0.3, 1.0, 1.2, 3.0)))
    if not process.is_dead:
        process.go_on()


async def _engine_dies(world: World) -> None:
    if engines := [each for replica in world.replicas for each in replica.engines.values()]:
        world.random.choice(engines).die("killed by the simulation")


async def _cut_off(world: World) -> None:
    """Two servers, or clients and a server."""
    names = world.random.sample(["client", *(r.name for r in world.replicas)], 2)
    pair = frozenset(names)
    world.network.cut.add(pair)
    await asyncio.sleep(world.random.random() * 10)
    world.network.cut.discard(pair)


async def _database_goes_away(world: World) -> None:
    world.database.is_away = True
    await asyncio.sleep(world.random.choice((0.5, 3.0, 10.0)))
    world.database.is_away = False


async def _session_is_dropped(world: World) -> None:
    """By the database, though the server lives; others may find nobody at its address either."""
    victim = _victim(world)
    pairs = {frozenset((victim.name, other.name)) for other in world.replicas if other != victim}
    is_cut = world.random.random() < 0.5
    world.network.cut |= pairs if is_cut else set()
    world.database.end_sessions(victim.name)
    await asyncio.sleep(world.random.random() * 3)
    world.network.cut -= pairs if is_cut else set()


async def _answers_get_lost(world: World) -> None:
    """Servers end and begin meanwhile, and each may hear nothing of what it has written."""
    world.database.lost_answers = 0.5
    await asyncio.sleep(world.random.choice((0.5, 3.0, 10.0)))
    world.database.lost_answers = FEW_LOST_ANSWERS


async def _disk_is_full(world: World) -> None:
    world.disk.is_full = True
    await asyncio.sleep(world.random.choice((0.5, 3.0, 10.0)))
    world.disk.is_full = False


async def _clock_jumps(world: World) -> None:
    if world.random.random() < 0.5:
        world.database.clock_error += world.random.uniform(-3.0, 3.0)
    else:
        _victim(world).process.clock_error += world.random.uniform(-30.0, 30.0)


async def _power_fails(world: World) -> None:
    """On the one machine that all of them are on."""
    for replica in world.replicas:
        if not replica.process.is_dead:
            await replica.kill()
    world.disk.lose_power()


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens, and after how long on average: one of these in each life."""

    kinds: tuple[Callable[[World], Awaitable[None]], ...]
    mean_seconds: tuple[float, ...]


ANY_TROUBLE = Trouble(
    (
        *[_kill] * 3,
        *[pause_one] * 3,
        *[_engine_dies] * 2,
        _stop,
        _cut_off,
        _database_goes_away,
        _session_is_dropped,
        _answers_get_lost,
        _disk_is_full,
        _clock_jumps,
        _power_fails,
    ),
    mean_seconds=(5.0, 10.0, 30.0),
)
PAUSES = Trouble((pause_one,), mean_seconds=(2.0,))
SESSIONS = Trouble((_kill, _session_is_dropped), mean_seconds=(3.0,))
TAKEOVERS = Trouble((_kill, *[_answers_get_lost] * 2), mean_seconds=(1.0,))


# Running


def live(seed: int, trouble: Trouble = ANY_TROUBLE) -> Lived | str:
    """Live once; what went wrong, in words, if anything did."""
    with _quiet_burials():
        try:
            return _run(seed, trouble)
        except Exception as error:
            return f"seed {seed}: " + "".join(traceback.format_exception(error))
        finally:
            gc.collect()


def _run(seed: int, trouble: Trouble) -> Lived:
    """Live once. What went wrong is raised, with the seed."""
    _template()
    for number in range(NUM_PROGRAMS):
        program(number)
    with tempfile.TemporaryDirectory(
        prefix="tinsmith-life-", dir=_IN_MEMORY if _IN_MEMORY.exists() else None
    ) as folder:
        return _live(seed, trouble, Path(folder))


def _live(seed: int, trouble: Trouble, folder: Path) -> Lived:
    loop = ProcessLoop(seed)
    world = World(loop.random, folder)
    world.folder.mkdir()
    shutil.copy(_template()[0], DataFolder(world.folder).database)
    inline_bytes = loop.random.choice((200, 65_536, 65_536, 65_536))
    for replica in world.replicas:
        replica.inline_bytes = inline_bytes

    async def main(random: random.Random) -> None:
        await world.live(trouble)

    with (
        simulated_machine(seed, clock_error, world.disk.fsync),
        world.disk.in_use(),
    ):
        run_loop(loop, seed, main)
    try:
        world.check()
    except BaseException as error:
        error.add_note(f"replay with seed {seed}")
        raise
    num_operations = sum(client.num_operations for client in world.clients)
    num_faults = world.num_troubles + world.network.num_faults + world.database.num_faults
    return Lived(loop.num_steps, num_operations, len(world.history), num_faults, loop.time())


@contextmanager
def _quiet_burials() -> Iterator[None]:
    """Dead processes leave coroutines that nobody awaits and tasks that never end. What servers
    have to say of their troubles would keep them for whoever collects it."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with patch.object(sys, "unraisablehook", lambda about: None), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        logging.disable(level)


@cache
def _template() -> tuple[Path, list[str]]:
    """A database with all tables, and its owners' keys."""
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-template-"))
    file = folder / "tinsmith.db"

    async def make() -> list[str]:
        store = Store(sqlite_url(file), folder / "blobs")
        keys = [(await create_key(store, owner, "key"))[0] for owner in OWNERS]
        await store.close()
        return keys

    return file, asyncio.run(make())
