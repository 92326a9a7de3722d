"""What owners write down about their models and checkpoints, and the bound of it for each of them.

It is counted in memory. What was deleted meanwhile is noticed when an owner has no room left: then
the store is asked again, now and then.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinsmith.server.store.errors import OverQuotaError, StoreUnavailableError
from tinsmith.server.store.store import Store
from tinsmith.server.tuning import TUNING

_FREE_BYTES = 64
"""A text no longer than this counts with what it belongs to."""


def size_of(*texts: object) -> int:
    """The bytes of texts, as JSON as the store writes it, of those that count."""
    sizes = (len(json.dumps(text)) for text in texts if text)
    return sum(size for size in sizes if size > _FREE_BYTES)


class MetadataRoom:
    def __init__(self, store: Store, most: int, count_pause: float = TUNING.count_pause) -> None:
        """An owner has at most so many bytes."""
        self._count_pause = count_pause
        self._store = store
        self._most = most
        self._held: dict[str, _Held] = {}

    @asynccontextmanager
    async def taken(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """While something is written that takes so much of the owner's room, and does from then on
        if it was written."""
        if not num_bytes:
            yield
            return
        held = self._held.setdefault(owner, _Held())
        has_room = held.num_bytes + num_bytes <= self._most
        if not held.is_known or (not has_room and time.monotonic() >= held.next_count_at):
            await self._look_for(num_bytes, owner, held)
        if held.num_bytes + num_bytes > self._most:
            raise OverQuotaError(
                f"user_metadata: has {num_bytes} bytes, and that of this owner's models and "
                f"checkpoints would have {held.num_bytes + num_bytes}; the limit is {self._most} "
                "(key_max_metadata_bytes). Give less, or delete checkpoints that have much"
            )
        held.under_way += num_bytes
        try:
            yield
            held.written += num_bytes
        except (StoreUnavailableError, asyncio.CancelledError):
            held.is_known = False  # it may be there
            raise
        finally:
            held.under_way -= num_bytes

    async def _look_for(self, num_bytes: int, owner: str, held: _Held) -> None:
        """Room for so much, in the store; those who look together share one answer."""
        asked_at = time.monotonic()
        async with held.counting:
            has_room = held.is_known and held.num_bytes + num_bytes <= self._most
            if not has_room and held.counted_at <= asked_at:
                await self._count(owner, held)

    async def _count(self, owner: str, held: _Held) -> None:
        began_at, before = time.monotonic(), held.written
        found = await self._store.models.text_bytes(owner, _FREE_BYTES)
        found += await self._store.checkpoints.text_bytes(owner, _FREE_BYTES)
        # What was written meanwhile may be in it or not.
        held.written = found + (held.written - before)
        held.counted_at, held.is_known = began_at, True
        now = time.monotonic()
        held.next_count_at = now + self._count_pause * (now - began_at)


@dataclass(slots=True)
class _Held:
    written: int = 0
    under_way: int = 0
    is_known: bool = False
    counted_at: float = 0.0
    next_count_at: float = 0.0
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_bytes(self) -> int:
        return self.written + self.under_way
