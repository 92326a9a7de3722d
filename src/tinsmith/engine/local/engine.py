"""`LocalEngine`: the engine interface, served by a process on this machine.

The calls are `RemoteEngine`'s; here the process is started, watched and, when it hangs or is no
longer wanted, ended. This module imports no torch: what the process does with a request is for
`boundary/worker.py` and `core.py`. Any number of engines may live side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinsmith.engine.local import progress
from tinsmith.engine.local.boundary.messages import Patience, Start
from tinsmith.engine.local.boundary.watched import WatchedEngine
from tinsmith.errors import EngineError

if TYPE_CHECKING:
    from tinsmith.engine.local.config import LocalEngineConfig

logger = logging.getLogger(__name__)

CORE = "tinsmith.engine.local.core:EngineCore"

LEADING_CORE = "tinsmith.engine.local.ranks.lockstep:LeadingCore"
"""The core where there are several ranks; it starts the others."""

START_SECONDS = 300.0
"""Most time for the process to import torch and open its device."""

CLOSE_SECONDS = 5.0
"""Most time for the process to end by itself once asked; then it is killed."""

REAP_SECONDS = 0.5
"""Most time to learn the exit status and last words of a process whose socket has closed."""

NUM_LAST_LINES = 30
"""Lines of the process's output that become part of the reason when it dies."""


class LocalEngine(WatchedEngine):
    """The engine on this machine; make one with `start`, and `close` it when done."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._is_closing = False
        self._verdict: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._output = asyncio.create_task(self._read_output())
        self._funeral: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: LocalEngineConfig,
        *,
        core: str | None = None,
        patience: Patience | None = None,
        cuda_devices: Sequence[int] = (),
    ) -> LocalEngine:
        """Start the process; returns when it is ready for requests.

        `core` names the class that computes, as `module:name`, for tests of the boundary itself.
        The process sees of several CUDA devices only `cuda_devices`, where some are given; its
        ranks have them in that order.
        """
        patience = patience or Patience()
        core = core or core_of(config)
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "tinsmith.engine.local.boundary.process", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # Threads that wait give their core away: spinning, as is the default, slows a
                # pass several times as soon as anything else runs on the machine.
                env={
                    "OMP_WAIT_POLICY": "passive",
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **_visible(cuda_devices),
                },
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        engine = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                await engine.connect(ours, Start(core, config, patience))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await engine.close()
            ours.close()
            if isinstance(error, TimeoutError):
                problem = f"engine process {process.pid} was not ready after {START_SECONDS:g} s"
                raise EngineError(problem) from None
            raise
        engine._watch = asyncio.create_task(engine._watch_pulse(patience.silence_seconds))
        logger.info("engine process %d is ready", process.pid)
        return engine

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def close(self) -> None:
        """End the process; calls still pending raise `EngineDiedError`. Returns when it is gone."""
        self._is_closing = True
        self._closed = self._closed or f"engine process {self.pid} was closed"
        if self._channel is not None:
            self._channel.close()
        elif not self._death.done():
            self.channel_lost(None)
        await asyncio.shield(self._death)
        if self._funeral is not None:
            await self._funeral
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])

    # What the process does

    async def _watch_pulse(self, silence_seconds: float) -> None:
        """Kill the process when it hangs."""
        problem = await self.hangs(silence_seconds)
        self._verdict = f"engine process {self.pid} {problem} and was killed"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def channel_lost(self, error: Exception | None) -> None:
        if self._funeral is None:
            self._funeral = asyncio.create_task(self._bury(error))

    async def _bury(self, error: Exception | None) -> None:
        """The socket is closed: learn how the process ended, or end it, and tell everyone."""
        patience = CLOSE_SECONDS if self._is_closing else REAP_SECONDS
        try:
            async with asyncio.timeout(patience):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        # The pipe may stay open longer than the process, in the hands of a child it started.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_SECONDS):
                await self._output
        reason = self._reason(error)
        if not self._is_closing:
            logger.error("%s", reason)
        self._death.set_result(reason)
        self._end(reason)

    def _reason(self, error: Exception | None) -> str:
        if self._is_closing:
            return f"engine process {self.pid} was closed"
        reason = self._verdict
        if reason is None:
            reason = f"engine process {self.pid} {_describe_exit(self._process.returncode)}"
        if error is not None:
            reason += f" after its socket failed ({error})"
        if self._last_lines:
            reason += "; its last output:\n" + "\n".join(self._last_lines)
        return reason

    async def _read_output(self) -> None:
        """Keep the process's last lines, and pass all of them on to the log."""
        stream = self._process.stdout
        assert stream is not None, "the process is started with a pipe"
        rest = b""
        while chunk := await stream.read(65536):
            # Progress bars end their lines with a carriage return.
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            self._take_lines(lines)
        self._take_lines([rest])

    def _take_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_lines.append(text)
                if not progress.hand_on(text):
                    logger.info("engine process %d: %s", self.pid, text)


def core_of(config: LocalEngineConfig) -> str:
    """Where the core of an engine with this configuration is."""
    return LEADING_CORE if config.ranks > 1 else CORE


def _visible(cuda_devices: Sequence[int]) -> dict[str, str]:
    """Of the devices that this process may use, those of these numbers, each once."""
    if not cuda_devices:
        return {}
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours else None
    chosen = []
    for number in dict.fromkeys(cuda_devices):
        if names is not None and number >= len(names):
            known = f"CUDA_VISIBLE_DEVICES is {ours}, which has {len(names)}"
            raise EngineError(f"there is no device cuda:{number}: {known}")
        chosen.append(names[number] if names else str(number))
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "is not responding"
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if name == "SIGKILL":
        return "was killed by SIGKILL, which is also what the kernel sends when memory runs out"
    return f"was killed by {name}"
