"""When unreachable objects are looked for."""

from __future__ import annotations

import asyncio
import gc

from tinsmith.server import garbage


class Node:
    """One of two that refer to each other, and that nothing else refers to."""

    def __init__(self) -> None:
        self.other: Node | None = None


async def test_new_objects_are_scanned_before_they_are_many() -> None:
    scanned: list[int] = []

    def on_collection(phase: str, facts: dict[str, int]) -> None:
        if phase == "start" and facts["generation"] == 0:
            scanned.append(gc.get_count()[0])

    async with garbage.collected_rarely(0.001):
        gc.callbacks.append(on_collection)
        try:
            while max(scanned, default=0) < garbage.NEW_OBJECTS:
                for _ in range(garbage.NEW_OBJECTS // 8):
                    one, two = Node(), Node()
                    one.other, two.other = two, one
                await asyncio.sleep(0.002)
            assert max(scanned) < 2 * garbage.NEW_OBJECTS
        finally:
            gc.callbacks.remove(on_collection)
        assert gc.get_count()[0] < garbage.NEW_OBJECTS


async def test_garbage_is_looked_for_when_memory_has_grown() -> None:
    memory = 10**9
    full: list[int] = []
    is_collected = asyncio.Event()
    async with garbage.collected_rarely(0.001, lambda: memory):
        assert not gc.isenabled()

        def on_collection(phase: str, facts: dict[str, int]) -> None:
            if phase == "start" and facts["generation"] == 2:
                full.append(memory)
                is_collected.set()

        gc.callbacks.append(on_collection)
        try:
            await asyncio.sleep(0.1)
            assert full == []
            memory += garbage.COLLECT_BYTES
            await is_collected.wait()
            await asyncio.sleep(0.1)
            assert full == [memory], "once for the growth, and not again"
        finally:
            gc.callbacks.remove(on_collection)
    assert gc.isenabled()
