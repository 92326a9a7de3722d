"""Processes in one event loop: their callbacks run, or wait while they are stopped, or never run.

Whoever starts a task in a process's context makes it part of that process, with all that it starts.
What is outside of any (clients, the network, whoever makes trouble) always runs.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

from tests.support.simulated_loop import Callback, SimulatedLoop

_MANY_TASKS = 200
_PRESENT: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class Process:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.clock_error = 0.0
        """By how many seconds its time of day is wrong."""
        self.held: list[Callback] = []
        self.tasks: list[asyncio.Task[Any]] = []
        """All that have not ended, and some that have."""
        self._num_left = _MANY_TASKS

    def add(self, task: asyncio.Task[Any]) -> None:
        self.tasks.append(task)
        if len(self.tasks) > 2 * self._num_left:
            self.tasks = [each for each in self.tasks if not each.done()]
            self._num_left = max(len(self.tasks), _MANY_TASKS)

    def spawn(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have the process do something; that it fails is found at the end, if not before."""
        context = outside()
        context.run(_PRESENT.set, self)
        return _loop().create_task(_reported(doing), context=context)

    def stop(self) -> None:
        """As SIGSTOP does it."""
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        _loop().take_back(self.held)
        self.held = []

    def kill(self) -> None:
        """As SIGKILL does it: not even what would clean up runs."""
        self.is_dead = self.is_stopped = True
        self.held = []
        _loop().bury(self)


def outside() -> contextvars.Context:
    """For what happens in no process."""
    return contextvars.Context()


def clock_error() -> float:
    """That of the process whose code is running."""
    process = _PRESENT.get(None)
    return 0.0 if process is None else process.clock_error


class ProcessLoop(SimulatedLoop):
    def __init__(self, seed: int, max_steps: int = 1_000_000) -> None:
        super().__init__(seed, max_steps)
        self._buried: set[asyncio.Task[Any]] = set()

    def holds(self, handle: Callback) -> bool:
        process = handle._context.get(_PRESENT)
        if process is None or not process.is_stopped:
            return False
        if not process.is_dead:
            process.held.append(handle)
        return True

    def take_back(self, handles: list[Callback]) -> None:
        self._ready.extend(handles)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        process = _PRESENT.get(None) if context is None else context.get(_PRESENT)
        if process is not None:
            process.add(task)
        return task

    def bury(self, process: Process) -> None:
        """Nobody waits for the tasks of the dead."""
        self._buried.update(process.tasks)

    def tasks_left(self) -> set[asyncio.Task[Any]]:
        return super().tasks_left() - self._buried


async def _reported(doing: Coroutine[Any, Any, None]) -> None:
    try:
        await doing
    except Exception as error:
        _loop().call_exception_handler({"message": "a process failed", "exception": error})


def _loop() -> ProcessLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    return loop
