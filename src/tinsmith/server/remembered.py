"""Records that were read from the store, kept in memory: those used last, none that has changed.

Whoever changes a record in the store says so afterwards. What was being read at that moment may be
as it was before, and is not kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Remembered(Generic[R]):
    def __init__(self, read: Callable[[str], Awaitable[R | None]], most: int) -> None:
        """`read` gets a record from the store by its id; `most` are kept."""
        self._read = read
        self._most = most
        self._kept: dict[str, R] = {}
        """The one used last at the end."""
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, name: str, is_wanted: Callable[[R], bool]) -> R | None:
        """A record that is there and wanted; others are not kept."""
        num_changes = self._num_changes
        record = self._kept.get(name)
        if record is None:
            record = await self._read(name)
        if record is None or not is_wanted(record):
            return None
        if num_changes == self._num_changes:
            self._kept.pop(name, None)
            self._kept[name] = record
            if len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
        return record

    def changed(self, is_changed: Callable[[str, R], bool]) -> None:
        """Some records were changed in the store, or deleted."""
        self._num_changes += 1
        self._kept = {name: r for name, r in self._kept.items() if not is_changed(name, r)}

    def forget(self, name: str) -> None:
        """One record was changed in the store, or deleted, or nobody will ask for it."""
        self._num_changes += 1
        self._kept.pop(name, None)
