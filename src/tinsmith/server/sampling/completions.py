"""What ended, for clients that wait for all samples of a sampling session with one poll.

Each client of a sampling session has a channel. An answer comes with a cursor, and the next poll is
for what ended after it. Cursors begin at the time of the start, so that they go on rising over
restarts; one that this process has not given out asks for everything.

Such a client hears of a sample through its channel or not at all. So the samples that it was
promised are written to a journal, and those that a restart has lost are announced as failed: the
client asks for the result, is told that it is gone, and sends the request again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from tinsmith import disk
from tinsmith.types import FutureCompletion, FutureFailed

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""A sampling session, and one of its clients."""

_MANY_LINES = 10_000
"""A journal of fewer lines is not worth writing anew."""


@dataclass(slots=True, eq=False)
class _Channel:
    completions: dict[int, FutureCompletion] = field(default_factory=dict)
    """By cursor, in order."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0


class Completions:
    def __init__(self, journal: Path | None = None) -> None:
        """`journal` is where promised samples are written down; None: nobody needs them."""
        self._first = self._newest = time.time_ns() // 1000
        self._channels: dict[Key, _Channel] = {}
        self._is_draining = False
        self._journal: Journal | None = None
        self._lost_at = time.time()
        self._lost: set[str] = set()
        if journal is not None:
            for key, request_id in read_journal(journal):
                self._lost.add(request_id)
                self.add(key, FutureFailed(request_id=request_id))
            self._journal = Journal(journal)

    def __len__(self) -> int:
        return len(self._channels)

    def promise(self, key: Key, request_id: str) -> None:
        """A sample was accepted, and its client told so."""
        if self._journal is not None:
            self._journal.write(key, request_id)

    def add(self, key: Key, completion: FutureCompletion) -> None:
        self._newest += 1
        channel = self._channels.setdefault(key, _Channel())
        channel.completions[self._newest] = completion
        channel.arrived.set()

    async def wait(
        self, key: Key, after: int, seconds: float
    ) -> list[tuple[int, FutureCompletion]]:
        """What ended since cursor `after`; waits for the first if nothing did."""
        if not self._first <= after <= self._newest:
            after = 0
        channel = self._channels.setdefault(key, _Channel())
        channel.num_waiting += 1
        try:
            for cursor in [c for c in channel.completions if c <= after]:
                del channel.completions[cursor]
            if not channel.completions and not self._is_draining:
                channel.arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await channel.arrived.wait()
            return list(channel.completions.items())
        finally:
            channel.num_waiting -= 1
            self._free_unused(key, channel)

    def expire(self, is_kept: Callable[[str], bool], retention_seconds: float) -> None:
        """Forget completions whose result is gone, and channels that nobody needs."""
        if time.time() - self._lost_at > retention_seconds:
            self._lost.clear()
        for key, channel in list(self._channels.items()):
            channel.completions = {
                cursor: completion
                for cursor, completion in channel.completions.items()
                if is_kept(completion.request_id) or completion.request_id in self._lost
            }
            self._free_unused(key, channel)
        if self._journal is not None:
            self._journal.shorten(
                lambda request_id: is_kept(request_id) or request_id in self._lost
            )

    def begin_drain(self) -> None:
        """Let everybody who waits go, and hold nobody from now on."""
        self._is_draining = True
        for channel in self._channels.values():
            channel.arrived.set()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _free_unused(self, key: Key, channel: _Channel) -> None:
        if not channel.completions and not channel.num_waiting:
            self._channels.pop(key, None)


class Journal:
    """Samples that clients were promised, a line each. Not synced: it serves a process's restart,
    and after a machine's its clients send their requests again all the same."""

    def __init__(self, file: Path) -> None:
        self._file = file
        content = file.read_bytes() if file.exists() else b""
        self._num_lines = len(content.splitlines())
        self._is_whole = not content or content.endswith(b"\n")
        """Whether the last line was written, and wholly."""
        self._stream = self._open(file)

    def write(self, key: Key, request_id: str) -> None:
        """Add a line. A disk that takes none is no reason to refuse a sample, which needs no disk:
        only over a restart its client would wait in vain."""
        line = orjson.dumps([*key, request_id]) + b"\n"
        line = line if self._is_whole else b"\n" + line
        was_whole = self._is_whole
        try:
            self._is_whole = self._stream.write(line) == len(line)
            self._num_lines += 1
        except OSError as error:
            self._is_whole = False
            if was_whole:
                logger.warning("samples under way may not be announced after a restart: %s", error)

    def shorten(self, is_kept: Callable[[str], bool]) -> None:
        """Write the file anew without what nobody waits for, once it has grown."""
        if self._num_lines < _MANY_LINES:
            return
        try:
            kept = [entry for entry in read_journal(self._file) if is_kept(entry[1])]
            lines = [orjson.dumps([*key, request_id]) + b"\n" for key, request_id in kept]
            disk.publish_file(self._file, b"".join(lines))
            stream = self._open(self._file)
        except OSError as error:
            logger.warning("%s stays as long as it is: %s", self._file.name, error)
            return
        self._stream.close()
        self._stream, self._num_lines, self._is_whole = stream, len(kept), True

    def close(self) -> None:
        self._stream.close()

    @staticmethod
    def _open(file: Path) -> IO[bytes]:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return os.fdopen(descriptor, "ab", buffering=0)


def read_journal(file: Path) -> list[tuple[Key, str]]:
    """The entries of a journal; a line that a crash cut short is none."""
    if not file.exists():
        return []
    entries = []
    for line in filter(None, file.read_bytes().splitlines()):
        try:
            sampler_id, clone, request_id = orjson.loads(line)
        except ValueError:
            logger.warning("a line of %s cannot be read", file.name)
            continue
        entries.append(((str(sampler_id), int(clone)), str(request_id)))
    return entries
