"""Milliseconds that TCP with TLS adds to a call, over the socket pair of an engine that is a child.

The same calls go to the same core, which computes nothing, over both, in turns.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tinsmith.engine.base import Engine, Pass, Step
from tinsmith.engine.local.boundary.messages import Patience, Start
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.engine import LocalEngine
from tinsmith.engine.remote.cluster import RemoteCluster
from tinsmith.engine.remote.listener import EngineListener
from tinsmith.types import AdamParams, Datum, ModelInput

CORE = "engine_echo:EchoCore"
BLOCK = 100
"""Calls over one of them before the other has its turn."""

PASSES = {"pass of 1 x 64 tokens": (1, 64), "pass of 16 x 2,000 tokens": (16, 2000)}

Call = Callable[[Engine], Coroutine[Any, Any, None]]


def added_milliseconds(rounds: int) -> dict[str, dict[str, float]]:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    return asyncio.run(_compared(rounds))


async def _compared(rounds: int) -> dict[str, dict[str, float]]:
    calls: dict[str, Call] = {"step": _step}
    calls |= {name: _passes(*shape) for name, shape in PASSES.items()}
    with tempfile.TemporaryDirectory() as folder:
        cluster = RemoteCluster(EngineListener("127.0.0.1", 0, Path(folder) / "engines"))
        child = await LocalEngine.start(LocalEngineConfig(), core=CORE)
        connecting = asyncio.create_task(cluster.start(0, Start(CORE, None, Patience())))
        credentials = Path(folder) / "engines" / "slot-0.json"
        while not credentials.exists():  # noqa: ASYNC110  # once, before anything is timed
            await asyncio.sleep(0.05)
        command = [sys.executable, "-m", "tinsmith", "engine", "--credentials", str(credentials)]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        connected = await connecting
        try:
            return {
                name: await _added(call, child, connected, rounds) for name, call in calls.items()
            }
        finally:
            await connected.close()
            await child.close()
            await process.wait()
            await cluster.close()


async def _added(call: Call, child: Engine, connected: Engine, rounds: int) -> dict[str, float]:
    taken: dict[Engine, list[float]] = {child: [], connected: []}
    for _ in range(rounds):
        for engine, times in taken.items():
            for _ in range(BLOCK):
                started = time.perf_counter()
                await call(engine)
                times.append(1e3 * (time.perf_counter() - started))
    pair, tls = (statistics.median(times) for times in taken.values())
    return {
        "socket_pair_ms": round(pair, 3),
        "tcp_tls_ms": round(tls, 3),
        "added_ms": round(tls - pair, 3),
    }


async def _step(engine: Engine) -> None:
    await engine.step([Step(adapter_id="a", params=AdamParams())])


def _passes(num_sequences: int, length: int) -> Call:
    tokens = [place % 90 for place in range(length)]
    data = [
        Datum(
            model_input=ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * length},
        )
        for _ in range(num_sequences)
    ]
    whole = [Pass(adapter_id="a", data=data, loss_fn="cross_entropy")]

    async def call(engine: Engine) -> None:
        async for _ in engine.run_passes(whole):
            pass

    return call


if __name__ == "__main__":
    print(added_milliseconds(int(sys.argv[1]) if sys.argv[1:] else 5))
