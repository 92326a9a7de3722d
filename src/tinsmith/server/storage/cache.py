"""Copies of weights on this machine, as many as fit within a number of bytes.

Weights never change, so a copy is as good as the original for as long as it is there. Those used
longest ago make room, and never those that somebody reads or writes now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tinsmith import disk


class Cache:
    def __init__(self, root: Path, max_bytes: int) -> None:
        disk.create_folder(root)
        self._root = root
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._removing = asyncio.Lock()
        found = [f for f in root.iterdir() if not disk.is_draft(f)]
        self._sizes = {f.name: disk.size_of(f) for f in sorted(found, key=_changed_at)}
        """What is here, in the order of its last use."""

    def folder(self, weights_id: str) -> Path:
        return self._root / weights_id

    def __contains__(self, weights_id: str) -> bool:
        return weights_id in self._sizes

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @contextlib.contextmanager
    def held(self, weights_id: str) -> Iterator[Path]:
        """Weights that stay while the context lasts, once they are here."""
        self._held[weights_id] += 1
        try:
            yield self.folder(weights_id)
        finally:
            self._held[weights_id] -= 1
            if not self._held[weights_id]:
                del self._held[weights_id]
            if weights_id in self._sizes:
                self._sizes[weights_id] = self._sizes.pop(weights_id)

    async def add(self, weights_id: str) -> None:
        """Weights have just been written here."""
        self._sizes[weights_id] = await asyncio.to_thread(disk.size_of, self.folder(weights_id))
        await self.make_room(0)

    async def make_room(self, num_bytes: int) -> None:
        """Forget what was used longest ago, until so many bytes more are within the limit; what is
        being removed is gone when this returns."""
        async with self._removing:
            for weights_id in list(self._sizes):
                if self.num_bytes + num_bytes <= self._max_bytes:
                    break
                if not self._held[weights_id]:
                    await self._remove(weights_id)

    async def remove(self, weights_id: str) -> None:
        async with self._removing:
            await self._remove(weights_id)

    async def _remove(self, weights_id: str) -> None:
        self._sizes.pop(weights_id, None)
        await asyncio.to_thread(disk.discard_folder, self.folder(weights_id))

    async def sweep_drafts(self, writing: set[Path]) -> None:
        def sweep() -> None:
            for path in filter(disk.is_draft, [*self._root.iterdir()]):
                if path not in writing:
                    disk.discard_folder(path)

        await asyncio.to_thread(sweep)


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime
