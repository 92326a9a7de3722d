"""What is broken in a chaos run, and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import uuid
from pathlib import Path

import sqlalchemy

from chaos import invariants
from chaos.findings import Findings
from chaos.installation import Installation
from chaos.machinery import Server
from chaos.places import Fault
from chaos.rounds import Clients


class Faults:
    def __init__(
        self, site: Installation, clients: Clients, findings: Findings, chance: random.Random
    ) -> None:
        self._site = site
        self._clients = clients
        self._findings = findings
        self._chance = chance
        self._older = site.folder / "older.db"
        self.damaged: dict[str, str] = {}
        """Models of which a snapshot was damaged, and which."""

    def all(self) -> list[Fault]:
        """Those that are possible here."""
        faults: list[Fault] = [
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
        faults += self._site.place.faults()
        if self._site.server.num_engines > 1:
            faults.append(("slot emptied", 2, self._empty_slot))
            faults.append(("models moved", 4, self._move_models))
        if self._site.disk.is_small:
            faults.append(("disk filled", 3, self._fill_disk))
        if self._site.objects is not None:
            faults.append(("storage cut", 4, self._cut_storage))
            faults.append(("storage refused", 3, self._refuse_storage))
            faults.append(("storage silent", 2, self._silence_storage))
            faults.append(("copies lost", 2, self._lose_copies))
        if self._site.postgres is not None:
            faults.append(("database killed", 4, self._kill_database))
            faults.append(("database stopped", 2, self._stop_database))
        else:
            faults.append(("database locked", 3, self._lock_database))
        return faults

    async def _kill_server(self) -> None:
        server = self._some_server()
        await server.kill()
        await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        await server.start()

    async def _kill_server_twice(self) -> None:
        """The second time while it starts."""
        server = self._some_server()
        await server.kill()
        server.spawn()
        await asyncio.sleep(self._chance.uniform(0.2, 3.0))
        await server.kill()
        await server.start()

    async def _damage_snapshot(self) -> None:
        """Flip a bit in the newest snapshot of a model, once for each: it has two at a time."""
        await self._site.kill_all()
        tables = invariants.read(self._site.store_url)
        newest = {
            row["model_id"]: row["snapshot_weights_id"]
            for row in tables["models"]
            if row["snapshot_weights_id"] != row["previous_snapshot_weights_id"]
        }
        pending = {row["model_id"] for row in tables["operations"] if row["status"] == "pending"}
        # Those with something to do are certain to be rebuilt.
        candidates = sorted((newest.keys() & pending) - self.damaged.keys())
        if candidates:
            model_id = self._chance.choice(candidates)
            self.damaged[model_id] = newest[model_id]
            folder = self._site.kept_in / "weights" / newest[model_id]
            file = self._chance.choice(sorted(f for f in folder.iterdir() if f.stat().st_size))
            content = bytearray(file.read_bytes())
            content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
            file.write_bytes(content)
            shutil.rmtree(self._site.data / "cache" / newest[model_id], ignore_errors=True)
            self._findings.counts["snapshots with a flipped bit"] += 1
        await self._site.start_all()

    async def _kill_engine(self) -> None:
        pid = self._some_engine()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._findings.counts["engines that died"] += 1

    async def _empty_slot(self) -> None:
        slot = self._chance.randrange(self._site.server.num_engines)
        await asyncio.to_thread(self._site.server.cluster, "drain", slot)
        await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        await asyncio.to_thread(self._site.server.cluster, "resume", slot)

    async def _move_models(self) -> None:
        """Those that have something to do."""
        with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
            tables = await asyncio.to_thread(invariants.read, self._site.store_url)
            pending = {o["model_id"] for o in tables["operations"] if o["status"] == "pending"}
            for model_id in sorted(pending):
                slot = self._chance.randrange(self._site.server.num_engines)
                is_moved = await asyncio.to_thread(self._site.server.move, model_id, slot)
                self._findings.counts["moves accepted"] += is_moved

    async def _set_clock(self) -> None:
        """By an hour or by a day, to and fro; half of the time somebody sets it right again."""
        self._site.server.set_clock(self._chance.choice([-3600.0, 0.0, 0.0, 3600.0, 86400.0]))

    async def _try_other_stores(self) -> None:
        """A new database, and one as it was when this was last tried: both are refused."""
        await self._site.kill_all()
        if self._site.postgres is None:
            strangers = [f"sqlite:///{self._site.folder / uuid.uuid4().hex}.db"]
            strangers += [f"sqlite:///{self._older}"] if self._older.exists() else []
        else:
            strangers = [
                self._site.postgres.create_database(
                    f"new_{self._findings.counts['stores refused']}"
                )
            ]
        before = _files(self._site.kept_in)
        for url in strangers:
            code, said = await asyncio.to_thread(
                self._site.server.start_with, url, *self._site.storage_options
            )
            self._findings.counts["stores refused"] += 1
            if code == 0 or "do not belong together" not in said:
                self._findings.problems.append(f"{url} was not refused ({code}): {said[-500:]}")
        after = _files(self._site.kept_in)
        # An upload that was under way when its server was killed may still have arrived.
        if after != before if self._site.bucket is None else not before.items() <= after.items():
            self._findings.problems.append(
                "a start with another store changed the data folder or storage"
            )
        if self._site.postgres is None:
            _copy(self._site.data / "tinsmith.db", self._older)
        await self._site.start_all()

    async def _stop_server(self) -> None:
        """With others beside it sometimes for longer than they wait."""
        server = self._some_server()
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(0.5, 4.0 if len(self._site.servers) == 1 else 9.0))
        server.signal(signal.SIGCONT)

    async def _stop_engine(self) -> None:
        """Sometimes for longer than a server waits for a sign of life."""
        seconds = self._chance.choice([1.0, 3.0, 9.0])
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
        await asyncio.to_thread(self._site.disk.fill)
        await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        self._site.disk.free()

    async def _stop_database(self) -> None:
        """It is there and does not answer."""
        assert self._site.postgres is not None
        self._site.postgres.signal(signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        self._site.postgres.signal(signal.SIGCONT)

    async def _lock_database(self) -> None:
        """Somebody else writes into the file for long."""
        database = sqlite3.connect(
            self._site.data / "tinsmith.db", timeout=10, isolation_level=None
        )
        try:
            with contextlib.suppress(sqlite3.OperationalError):
                database.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        finally:
            database.close()

    async def _kill_database(self) -> None:
        assert self._site.postgres is not None
        await asyncio.to_thread(self._site.postgres.stop)
        await asyncio.sleep(self._chance.uniform(0.0, 3.0))
        await asyncio.to_thread(self._site.postgres.start)

    async def _cut_storage(self) -> None:
        number = self._site.storage_proxy.cut(self._chance.uniform(0.2, 1.0))
        self._findings.counts["connections to the storage that were cut"] += number

    async def _refuse_storage(self) -> None:
        self._site.storage_proxy.is_refusing = True
        self._site.storage_proxy.cut()
        await asyncio.sleep(self._chance.uniform(0.3, 5.0))
        self._site.storage_proxy.is_refusing = False

    async def _silence_storage(self) -> None:
        self._site.storage_proxy.is_silent = True
        await asyncio.sleep(self._chance.uniform(0.5, 8.0))
        self._site.storage_proxy.is_silent = False

    async def _lose_copies(self) -> None:
        """The servers go on on machines that have none."""
        await self._site.kill_all()
        shutil.rmtree(self._site.data / "cache")
        await self._site.start_all()

    async def _cut(self) -> None:
        self._findings.counts["connections that were cut"] += self._site.proxy.cut(
            self._chance.uniform(0.2, 1.0)
        )

    async def _delay(self) -> None:
        self._site.proxy.delay_seconds = self._chance.uniform(0.05, 0.5)
        await asyncio.sleep(self._chance.uniform(1.0, 3.0))
        self._site.proxy.delay_seconds = 0.0

    async def _refuse(self) -> None:
        self._site.proxy.is_refusing = True
        self._site.proxy.cut()
        await asyncio.sleep(self._chance.uniform(0.3, 2.0))
        self._site.proxy.is_refusing = False

    async def _kill_client(self) -> None:
        self._clients.kill_one(self._chance)

    def _some_server(self) -> Server:
        servers = self._site.servers
        return servers[0] if len(servers) == 1 else self._chance.choice(servers)

    def _some_engine(self) -> int | None:
        processes = self._site.ranks()
        return self._chance.choice(processes) if processes else None


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
