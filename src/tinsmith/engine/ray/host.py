"""The actor that stands for an engine in Ray: it holds the resources, and runs the engine.

The engine is a process of its own, which talks to its server and to nobody else. When it ends the
actor goes, too, whether or not anybody is left to tell: nothing stays behind of a server that died.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import deque

import ray

_NUM_LAST_LINES = 30
_LOOK_SECONDS = 0.2
_FAREWELL_SECONDS = 10.0
"""How long the actor stays to say how its engine ended."""


@ray.remote(max_restarts=0, max_task_retries=0)
class EngineHost:
    def __init__(self, credentials: str) -> None:
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tinsmith", "engine", "--credentials", credentials],
            env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # It ends with its connection and not with Ray: a cluster that has lost its head takes
            # its workers along after a while, and engines at work go on.
            start_new_session=True,
        )
        self._has_ended = threading.Event()
        threading.Thread(target=self._watch, name="engine", daemon=True).start()

    async def node_id(self) -> str:
        """The node that this runs on; an answer also shows that the actor is alive."""
        return str(ray.get_runtime_context().get_node_id())

    async def ended(self) -> str:
        """Wait until the engine has ended; how it did. Any number of placers may ask."""
        while not self._has_ended.is_set():  # noqa: ASYNC110  # a thread sets it
            await asyncio.sleep(_LOOK_SECONDS)
        status = self._process.returncode
        lines = "".join(f"\n{line}" for line in self._last_lines)
        return f"ended with status {status}" + (f"; its last output:{lines}" if lines else "")

    def _watch(self) -> None:
        assert self._process.stdout is not None, "the process is started with a pipe"
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip())
        self._process.wait()
        self._has_ended.set()
        threading.Timer(_FAREWELL_SECONDS, os._exit, [0]).start()
