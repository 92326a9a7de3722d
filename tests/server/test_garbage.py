"""When unreachable objects are looked for."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from tinsmith.server import garbage

if TYPE_CHECKING:
    pass


async def test_garbage_is_looked_for_when_memory_has_grown() -> None:
    memory = 10**9
    full: list[int] = []
    async with garbage.collected_rarely(0.01, lambda: memory):
        assert not gc.isenabled()

        def on_collection(phase: str, facts: dict[str, int]) -> None:
            if phase == "start" and facts["generation"] == 2:
                full.append(memory)

        gc.callbacks.append(on_collection)
        try:
            await asyncio.sleep(0.1)
            assert full == []
            memory += garbage.COLLECT_BYTES
            await asyncio.sleep(0.5)
            assert full == [memory], "once for the growth, and not again"
        finally:
            gc.callbacks.remove(on_collection)
    assert gc.isenabled()
