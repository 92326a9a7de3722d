"""When Python's cyclic garbage collector runs.

With thousands of held polls there are many objects to scan and almost none to free, and every
request waits meanwhile: a second for a full collection. By default Python scans a large part every
few seconds. Here only new objects are scanned, while they are few enough for a millisecond; and all
of them once an hour, and whenever memory has grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable

from tinsmith.memory import process_bytes

logger = logging.getLogger(__name__)

_COLLECT_SECONDS = 3600.0
COLLECT_BYTES = 256 * 1024 * 1024
NEW_OBJECTS = 8192
"""So many are scanned at once, and what there is every second: a few may hold much memory."""

_LOOKS_PER_SECOND = 20


@contextlib.asynccontextmanager
async def collected_rarely(
    look_seconds: float = 1.0 / _LOOKS_PER_SECOND, measure: Callable[[], int] = process_bytes
) -> AsyncIterator[None]:
    """`measure` says how much memory the process has."""
    gc.collect()
    gc.freeze()  # what is there now stays until the end
    gc.disable()
    task = asyncio.create_task(_collect_when_due(look_seconds, measure), name="garbage")
    try:
        yield
    finally:
        task.cancel()
        gc.enable()
        gc.unfreeze()


async def _collect_when_due(look_seconds: float, measure: Callable[[], int]) -> None:
    memory, since = measure(), time.monotonic()
    for look in itertools.count(1):
        await asyncio.sleep(look_seconds)
        is_second = look % _LOOKS_PER_SECOND == 0
        if is_second or gc.get_count()[0] >= NEW_OBJECTS:
            gc.collect(generation=0)
        if not is_second:
            continue
        has_grown = measure() - memory >= COLLECT_BYTES
        if has_grown or time.monotonic() - since >= _COLLECT_SECONDS:
            started = time.perf_counter()
            found = gc.collect()
            logger.info(
                "garbage collection took %.3f s and found %d objects",
                time.perf_counter() - started,
                found,
            )
            memory, since = measure(), time.monotonic()
