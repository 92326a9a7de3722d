"""What changes without a word, looked at again and again: engines, and keys made elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tinsmith.server.console.events import Events

WATCH_SECONDS = 0.4
"""How often; whoever looks hears of a change within a second."""


async def watch(events: Events, looks: Mapping[str, Callable[[], object]]) -> None:
    """Tell everybody of the events whose look gives another value than before."""
    seen = {name: look() for name, look in looks.items()}
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        for name, look in looks.items():
            found = look()
            if found != seen[name]:
                seen[name] = found
                events.changed_for_all(name)
