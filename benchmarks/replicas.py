"""Two servers under load, and each of them killed: what clients see of it.

    python benchmarks/replicas.py [--seconds 120] [--clients 500] [--polls 4000] [--rate 1000]

The load is that of `load.py`, on two servers that share a Postgres and a folder. Clients know both:
a connection that ends is opened again to the other one, and what was lost with it or answered with
503 is sent again, as the SDK does by itself; so each time is that until the answer counts. After a
third of the time the server that leads is killed (`kill -9`) and started again, after two thirds
the one that follows. `trained` is from the sending of a pass or a step to its result.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import runpy
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from load import TOKEN_SECONDS, Server, drive
from load_clients import Client, Connection, Measured
from reports import write_report

MACHINERY = Path(__file__).parents[1] / "tools" / "chaos" / "machinery.py"
AGAIN_SECONDS = 0.25


class Mortal(Server):
    """One that takes nothing while it is dead."""

    def memory_mb(self) -> float:
        return super().memory_mb() if self._process.poll() is None else 0.0

    def descriptors(self) -> int:
        return super().descriptors() if self._process.poll() is None else 0

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() if self._process.poll() is None else 0.0


class Wandering(Connection):
    """A connection to any of several servers, to the next one when it ends."""

    def __init__(self, addresses: list[tuple[str, int]], first: int, seen: Counter[str]) -> None:
        self._addresses = itertools.cycle(addresses[first:] + addresses[:first])
        self._seen = seen
        self._present: Connection | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        while True:
            try:
                if self._present is None:
                    self._present = await Connection.open(*next(self._addresses))
                status, body = await self._present.ask(request)
            except OSError as error:
                self._present = None
                self._seen[type(error).__name__] += 1
            else:
                if status != 503:
                    return status, body
                self._seen["503"] += 1
            await asyncio.sleep(AGAIN_SECONDS)


class Wanderer(Client):
    def __init__(
        self,
        addresses: list[tuple[str, int]],
        key: str,
        measured: Measured,
        seen: Counter[str],
    ) -> None:
        super().__init__(addresses[0], key, measured)
        self._addresses = addresses
        self._seen = seen
        self._sent_at: dict[str, float] = {}
        self._turns = itertools.count()

    async def _connection(self) -> Connection:
        turn = (hash(self._key) + next(self._turns)) % len(self._addresses)
        return Wandering(self._addresses, turn, self._seen)

    async def _submit(self, connection: Connection, seq_id: int, *, is_pass: bool) -> str:
        began = time.perf_counter()
        request_id = await super()._submit(connection, seq_id, is_pass=is_pass)
        self._sent_at[request_id] = began
        return request_id

    async def _result(self, connection: Connection, request_id: str) -> None:
        await super()._result(connection, request_id)
        began = self._sent_at.pop(request_id, None)
        if began is not None:
            self._measured.note("trained", 200, time.perf_counter() - began)


async def kill_each(servers: list[Server], seconds: float, killed: list[str]) -> None:
    for role in ("leader", "follower"):
        await asyncio.sleep(seconds / 3)
        roles: list[str] = []
        while role not in roles:
            roles = [await asyncio.to_thread(role_of, server) for server in servers]
        victim = servers[roles.index(role)]
        await asyncio.to_thread(victim.kill)
        killed.append(role)
        await asyncio.sleep(2.0)
        await asyncio.to_thread(victim.start_again)


def role_of(server: Server) -> str:
    host, port = server.address
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=30) as answer:
            return str(json.load(answer)["role"])
    except urllib.error.HTTPError as error:
        error.close()
        return "not ready"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=120.0)
    options.add_argument("--clients", type=int, default=500)
    options.add_argument("--polls", type=int, default=4000)
    options.add_argument("--rate", type=float, default=1000.0)
    options.add_argument("--token-seconds", type=float, default=TOKEN_SECONDS)
    options.add_argument("--out", type=Path, help="write the result to this file")
    arguments = options.parse_args()
    database: Any = runpy.run_path(str(MACHINERY))["Postgres"]()
    database.start()
    with tempfile.TemporaryDirectory(prefix="tinsmith-load-") as folder:
        settings = {"database_url": database.url, "fake_token_seconds": arguments.token_seconds}
        data = Path(folder) / "data"
        first = Mortal(data, arguments.clients, **settings)
        keys = [*first.keys, first.harmful_key]
        servers = [first, Mortal(data, arguments.clients, keys=keys, **settings)]
        addresses = [server.address for server in servers]
        seen: Counter[str] = Counter()
        killed: list[str] = []
        try:
            found = uvloop.run(
                drive(
                    first,
                    seconds=arguments.seconds,
                    polls=arguments.polls,
                    rate=arguments.rate,
                    token_seconds=arguments.token_seconds,
                    new_client=lambda _, key, measured: Wanderer(addresses, key, measured, seen),
                    meanwhile=kill_each(servers, arguments.seconds, killed),
                )
            )
        finally:
            for server in servers:
                server.stop()
            database.close()
    # A sample that was lost with its server: both SDKs send the request again, as is done here.
    seen["410"] = found["errors"].pop("poll 410", 0)
    asked = {kind: times["max"] for kind, times in found["latency_ms"].items()}
    found |= {"killed": killed, "sent_again": dict(seen), "longest_wait_ms": max(asked.values())}
    write_report(arguments.out, found)


if __name__ == "__main__":
    main()
