"""`tinsmith serve` that records a run's steps and does not, by turns, and says what either costs.

    python benchmarks/console_server.py REPORT serve …

Each block of a quarter of a second either records or does not; no setting turns it off, so this
file does. What recording adds on the event loop is little beside what the loop's work varies by
from block to block. So it is timed where it happens, by the thread's own clock: making the step of
an operation, and telling those who look. In the writing thread a step costs more than its own
values, namely pages of the database on their way to the disk, so there the whole time of each
commit is noted, with what it held. At the end the blocks are written to REPORT.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

BLOCK_SECONDS = 0.25


@dataclass
class Block:
    """What happened, in counts and in seconds of processor time."""

    is_recording: bool = True
    operations: int = 0
    process: float = 0.0
    loop: float = 0.0
    on_loop: float = 0.0
    """Of the loop's time, what was spent on recording."""

    commits: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Of each its seconds, and how many writes, ends and steps it held."""


class Meter:
    """Switches recording on and off, and keeps account of both."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._now = Block()
        self._num_ends = self._num_steps = 0
        """Of the commit under way."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def install(self) -> None:
        """Put clocks around what records, before there is a server."""
        from tinsmith.server.operations import finishes
        from tinsmith.server.service import Service
        from tinsmith.server.store import writer
        from tinsmith.server.store.log import Log

        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (finishes, "observed", self._switched(finishes.observed, {})),
            (finishes, "_step", self._operation(self._switched(finishes._step, None))),
            (Service, "recorded", self._timed(Service.recorded, "on_loop")),
            (Log, "_finish_one", self._ended(Log._finish_one)),
            (writer, "commit", self._commit(writer.commit)),
        ]
        for place, name, function in patches:
            setattr(place, name, function)
        self._thread.start()

    def stop(self) -> list[Block]:
        self._is_over.set()
        self._thread.join()
        return self._blocks

    def _operation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._now.operations += 1
            return function(*args, **named)

        return call

    def _switched(self, function: Callable[..., Any], instead: Any) -> Callable[..., Any]:
        timed = self._timed(function, "on_loop")

        def call(*args: Any, **named: Any) -> Any:
            return timed(*args, **named) if self._now.is_recording else instead

        return call

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                ended = time.thread_time()
                spent = ended - began - (time.thread_time() - ended)  # less the clock's own
                block = self._now
                setattr(block, name, getattr(block, name) + spent)

        return call

    def _ended(self, finish_one: Callable[..., Any]) -> Callable[..., Any]:
        def call(log: Any, connection: Any, finish: Any, *args: Any) -> Any:
            self._num_ends += 1
            self._num_steps += finish.step is not None
            return finish_one(log, connection, finish, *args)

        return call

    def _commit(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        def call(connection: Any, batch: Any, *args: Any) -> Any:
            block = self._now
            self._num_ends = self._num_steps = 0
            began = time.thread_time()
            ends = commit(connection, batch, *args)
            seconds = time.thread_time() - began
            block.commits.append((seconds, len(batch), self._num_ends, self._num_steps))
            return ends

        return call

    def _run(self) -> None:
        coin = random.Random(0)
        loop = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        while not self._is_over.is_set():
            # Either kind first, so that nothing that comes and goes in step meets one of them.
            first = coin.random() < 0.5
            for is_recording in (first, not first):
                self._block(is_recording, loop)

    def _block(self, is_recording: bool, loop: int) -> None:
        block = Block(is_recording=is_recording)
        block.process, block.loop = -time.process_time(), -time.clock_gettime(loop)
        self._now = block
        self._is_over.wait(BLOCK_SECONDS)
        block.process += time.process_time()
        block.loop += time.clock_gettime(loop)
        self._blocks.append(block)


def main() -> None:
    from tinsmith.cli.__main__ import main as command

    _, report, *arguments = sys.argv
    meter = Meter()
    meter.install()
    try:
        command(arguments)
    finally:
        Path(report).write_bytes(orjson.dumps([asdict(block) for block in meter.stop()]))


if __name__ == "__main__":
    main()
