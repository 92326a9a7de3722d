"""The clients of a chaos run, one after another; what each puts out is compared with the output of
an undisturbed run, to the last bit."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from chaos.findings import Findings
from chaos.installation import Installation
from chaos.machinery import clean_environment, resident_bytes

PROGRAMS = ("sft", "rl", "resume", "custom", "pipelined", "gaps")
PACKAGES = ("tinker", "tinsmith")
STEPS = 12
"""Of a client; with more of them less of the run is spent on starting clients."""
CLIENT_SECONDS = 300.0
"""Most time for a client of that many steps."""
SEED = 7
LOOP_STEPS = 60
MAX_GROWTH_BYTES = 16 * 1024 * 1024
"""What a loop may add to the engine's memory; each of its samplers has a quarter of a MiB."""


class Clients:
    def __init__(self, site: Installation, findings: Findings, steps: int) -> None:
        self._site = site
        self._findings = findings
        self._steps = steps
        self._seconds = CLIENT_SECONDS * max(1.0, steps / STEPS)
        self._expected: dict[str, list[str]] = {}
        self.weights_of: dict[str, str] = {}
        """The program that a model belongs to, for models that reached their end."""
        self.finished: set[str] = set()
        """The models of clients that reached their end."""
        self._running: dict[asyncio.subprocess.Process, bool] = {}
        """Clients under way, and whether each has been killed."""

    async def run_undisturbed(self) -> None:
        """Each program once, for what the others are compared with."""
        runs = [self.run(program, PACKAGES[0], is_reference=True) for program in PROGRAMS]
        await asyncio.gather(*runs)

    async def run(self, program: str, package: str, *, is_reference: bool = False) -> None:
        process = await self._start(self._site.proxy.port, package, program, self._steps)
        self._running[process] = False
        try:
            async with asyncio.timeout(self._seconds):
                out, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            out, errors = await process.communicate()
            self._findings.problems.append(
                f"{package} {program} did not end in {self._seconds:g} s"
            )
        was_dropped = self._running.pop(process)
        lines = out.decode().splitlines()
        models = [line.split()[1] for line in lines if line.startswith("run ")]
        results = [line for line in lines if not line.startswith("run ")]
        # The official client's process sometimes aborts on its way out, with all its work done.
        is_complete = results[-1:] == ["end"]
        if is_reference and is_complete:
            self._expected[program] = results
            self.weights_of[models[-1]] = program
            self.finished.update(models)
        elif was_dropped:
            self._compare(program, package, results, self._expected[program][: len(results)])
        elif not is_complete:
            tail = errors.decode()[-1500:]
            self._findings.problems.append(
                f"{package} {program} ended with {process.returncode}: {tail}"
            )
        else:
            self._findings.counts["clients done"] += 1
            self.finished.update(models)
            self.weights_of[models[-1]] = program
            self._compare(program, package, results, self._expected[program])

    def kill_one(self, chance: random.Random) -> None:
        alive = [p for p, is_dropped in self._running.items() if not is_dropped]
        if alive:
            chosen = chance.choice(alive)
            self._running[chosen] = True
            chosen.kill()

    async def watch_memory(self) -> None:
        """The engines are as large after a second loop of samplers as they were after the first;
        of loops there are as many at a time as engines. Those of the first round, with several
        engines, do not count: not each has an engine for itself."""
        sizes = []
        num_engines = self._site.server.num_engines
        for _ in range(2 if num_engines == 1 else 3):
            if not all(await asyncio.gather(*[self._loop() for _ in range(num_engines)])):
                return
            sizes.append(sum(map(resident_bytes, self._site.engines())))
        self._findings.counts["engine's MiB after a loop"] = sizes[-2] >> 20
        self._findings.counts["engine's MiB after two loops"] = sizes[-1] >> 20
        if sizes[-1] - sizes[-2] > MAX_GROWTH_BYTES * num_engines:
            self._findings.problems.append(f"a loop of {LOOP_STEPS} samplers takes memory: {sizes}")

    async def _loop(self) -> bool:
        """Whether a loop of samplers came to its end."""
        process = await self._start(self._site.server.port, PACKAGES[0], "loop", LOOP_STEPS)
        out, errors = await process.communicate()
        if out.endswith(b"end\n"):
            return True
        self._findings.problems.append(f"the loop of samplers ended: {errors.decode()[-1500:]}")
        return False

    async def _start(
        self, port: int, package: str, program: str, steps: int
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *(str(Path(__file__).with_name("client.py")), package, program, str(SEED), str(steps)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **clean_environment(),
                "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
                "TINKER_API_KEY": self._site.server.key,
                "TINKER_TELEMETRY": "0",
            },
        )

    def _compare(self, program: str, package: str, results: list[str], expected: list[str]) -> None:
        self._findings.counts["results compared"] += len(results)
        if results != expected:
            pairs = zip(results, expected, strict=False)
            first = next((p for p in pairs if p[0] != p[1]), ("a missing line", ""))
            self._findings.problems.append(
                f"{package} {program} got {first[0]!r}, not {first[1]!r}"
            )
