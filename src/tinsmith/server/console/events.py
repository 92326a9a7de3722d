"""What happens in runs, told to whoever looks: events of what has just been recorded.

An event is made when the end that it tells of is on disk, and only if somebody looks. Its id is the
number of the entry in the store, so readers who were away are first told what the store has after
the last id they saw: they miss nothing and hear nothing twice. A reader who does not read is let
go and comes back the same way. What is no entry there (sessions, keys, queues, what is done to
checkpoints) is told to who is there, without an id.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson

from tinsmith.server.store.records import CheckpointRecord, ModelRecord, StepRecord
from tinsmith.server.store.store import Store
from tinsmith.server.tuning import TUNING, Tuning
from tinsmith.types.observing import RunOperation
from tinsmith.wire import json

GATHER_SECONDS = 0.2
"""How long events are gathered, so that many cost one message to each reader."""

ALIVE_SECONDS = 1.0
"""How often a stream with nothing to tell is awake, to see whether its reader still may listen."""

_ALIVE = b": alive\n\n"
_ROUNDS_PER_ALIVE = 15


@dataclass(slots=True, eq=False)
class Reader:
    """Whoever reads the stream, and what waits for them."""

    run: str | None
    max_bytes: int = TUNING.pending_bytes
    """A reader who lets more than this wait is let go."""
    pending: list[tuple[int | None, bytes]] = field(default_factory=list)
    num_bytes: int = 0
    noted: set[bytes] = field(default_factory=set)
    """What need not be told twice of what is pending."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def give(self, run: str | None, number: int | None, message: bytes) -> None:
        """Nothing once too much waits."""
        if self.run in (None, run) and self.num_bytes <= self.max_bytes:
            self.pending.append((number, message))
            self.num_bytes += len(message)
            self.wake.set()


class Events:
    def __init__(self, store: Store, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        self._store = store
        self._readers: dict[str, set[Reader]] = {}
        """By owner; only owners who look."""
        self._is_closed = False

    @property
    def num_readers(self) -> int:
        return sum(len(readers) for readers in self._readers.values())

    def recorded(self, model: ModelRecord, number: int, step: StepRecord) -> None:
        """An end, or metrics that a client posted, is on disk under a number."""
        if readers := self._readers.get(model.owner):
            message = _message(number, step)
            for reader in readers:
                reader.give(step.model_id, number, message)

    def changed(self, owner: str, name: str, data: dict[str, Any]) -> None:
        """Something of an owner's that is no entry of the store is another than before."""
        if readers := self._readers.get(owner):
            message = _event(name, data, None)
            for reader in readers:
                reader.give(data.get("run"), None, message)

    def checkpoint_changed(self, checkpoint: CheckpointRecord) -> None:
        about = {"run": checkpoint.model_id, "checkpoint": checkpoint.checkpoint_id}
        self.changed(checkpoint.owner, "checkpoint", about)

    def changed_often(self, owner: str, name: str, run: str | None) -> None:
        """Something of a run may be another than before, many times a second: what is heard
        together says it once."""
        if readers := self._readers.get(owner):
            message = _event(name, {"run": run}, None)
            for reader in readers:
                if message not in reader.noted:
                    reader.noted.add(message)
                    reader.give(run, None, message)

    def changed_for_all(self, name: str) -> None:
        """Something that is nobody's own is another than before."""
        message = _event(name, {}, None)
        for reader in itertools.chain.from_iterable(self._readers.values()):
            reader.give(reader.run, None, message)

    def close(self) -> None:
        """End all streams; those that begin now end at once."""
        self._is_closed = True
        for readers in self._readers.values():
            for reader in readers:
                reader.wake.set()

    async def stream(
        self, owner: str, run: str | None, after: int | None, seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Events of an owner's runs, or of one of them, from now on or after an entry, for so many
        seconds. Yields at least every second, nothing where there is nothing to tell."""
        end = time.monotonic() + seconds
        reader = Reader(run, self._tuning.pending_bytes)
        self._readers.setdefault(owner, set()).add(reader)
        try:
            yield b"retry: 1000\n\n"
            last = 0
            if after is not None:
                # Whatever is recorded from here on is pending already, perhaps a second time.
                last, missed = await self._missed(owner, run, after)
                yield missed
            rounds = 0
            while reader.num_bytes <= reader.max_bytes and not self._is_closed:
                left = end - time.monotonic()
                if left <= 0:
                    break
                rounds += 1
                await _woken(reader, min(left, ALIVE_SECONDS))
                told, reader.pending, reader.num_bytes = reader.pending, [], 0
                reader.noted.clear()
                news = b"".join(
                    message for number, message in told if number is None or number > last
                )
                yield news or (b"" if rounds % _ROUNDS_PER_ALIVE else _ALIVE)
        finally:
            self._readers[owner].discard(reader)
            if not self._readers[owner]:
                del self._readers[owner]

    async def _missed(self, owner: str, run: str | None, after: int) -> tuple[int, bytes]:
        """What was recorded after an entry, and the number of the last one."""
        newest = await self._store.steps.last_entry()
        most = self._tuning.repeated_steps
        steps = await self._store.steps.since(after, owner, run, most + 1)
        if steps is not None and len(steps) <= most and after <= newest:
            last = steps[-1].entry_id if steps else after
            return last, b"".join(_message(step.entry_id, step) for step in steps)
        # Too much has happened since; or an older copy of the store was brought back, and what
        # has this number is still to come.
        return newest, _event("reset", {"reason": "read the curves again, and go on here"}, newest)


async def _woken(reader: Reader, seconds: float) -> None:
    """Return when there is something to tell, gathered for a moment, or after some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await reader.wake.wait()
    except TimeoutError:
        return
    await asyncio.sleep(GATHER_SECONDS)
    reader.wake.clear()


def _message(number: int, step: StepRecord) -> bytes:
    """The events of one entry. The id stands in the last: they are heard together or not at all."""
    events: list[tuple[str, Any]] = []
    if step.source == "operation":
        events.append(("operation", {"run": step.model_id, **operation_of(step).to_wire()}))
        if step.status == "done" and step.seq_id == 0:
            events.append(("run", {"run": step.model_id}))
        if step.made is not None and "/" in step.made:
            events.append(("checkpoint", {"run": step.model_id, "checkpoint": step.made}))
    if step.metrics != "{}":
        events.append(
            (
                "step",
                {
                    "run": step.model_id,
                    "seq": step.seq_id,
                    "kind": step.kind,
                    "axis": "seq" if step.source == "operation" else "step",
                    "t": step.at,
                    "metrics": orjson.Fragment(step.metrics),
                },
            )
        )
    last = len(events) - 1
    return b"".join(
        _event(name, data, number if place == last else None)
        for place, (name, data) in enumerate(events)
    )


def _event(name: str, data: Any, number: int | None) -> bytes:
    head = b"" if number is None else b"id: %d\n" % number
    return head + b"event: %b\ndata: %b\n\n" % (name.encode(), json.encode(data))


def operation_of(step: StepRecord) -> RunOperation:
    """An operation that has ended."""
    started = step.at - step.run_seconds
    return RunOperation(
        seq=step.seq_id,
        kind=step.kind,
        status=step.status,
        submitted=started - step.wait_seconds,
        started=started,
        ended=step.at,
        tokens=step.num_tokens,
        error=step.error,
        made=step.made,
    )
