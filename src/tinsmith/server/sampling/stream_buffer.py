"""Between the engine and the reader of a stream: a slow reader holds up only itself.

A job holds its sampler's place in the engine until its last event has been taken. So events are
taken as they come and wait here for their reader, up to a number; beyond it the job waits for its
reader, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from tinsmith.engine.base import Failure, SampleEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    max_events: int = 4096
    """Most events that wait for their reader."""
    seconds: float = 30.0
    """How long, all in all, a job may wait for its reader."""


async def buffered(
    events: AsyncGenerator[SampleEvent, None], patience: Patience
) -> AsyncGenerator[SampleEvent, None]:
    """The same events; where the reader is too slow for the patience, a failure ends them.

    Leaving the iterator closes `events`.
    """
    waiting: asyncio.Queue[SampleEvent | None] = asyncio.Queue()
    room = asyncio.Semaphore(patience.max_events)
    taking = asyncio.create_task(_take_all(events, waiting, room, patience.seconds))
    try:
        while (event := await waiting.get()) is not None:
            room.release()
            yield event
        if await taking:
            yield Failure(
                "the stream was ended because it was read too slowly: it had waited "
                f"{patience.seconds:g} s for its reader",
                "user",
            )
    finally:
        taking.cancel()
        await asyncio.wait([taking])


async def _take_all(
    events: AsyncGenerator[SampleEvent, None],
    waiting: asyncio.Queue[SampleEvent | None],
    room: asyncio.Semaphore,
    seconds_left: float,
) -> bool:
    """Put all events into `waiting`, then None; whether they were given up for lack of room."""
    clock = asyncio.get_running_loop().time
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                began = clock()
                try:
                    async with asyncio.timeout(seconds_left):
                        await room.acquire()
                except TimeoutError:
                    return True
                seconds_left -= clock() - began
                waiting.put_nowait(event)
        return False
    finally:
        waiting.put_nowait(None)
