"""A queue with a lane for each scope: order of arrival within a lane, and no order between them.

Who comes next is the caller's choice among the scopes that wait, so that one scope with thousands
of items is no longer in the way of another with one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    def __init__(self, scope_of: Callable[[Item], str]) -> None:
        self._scope_of = scope_of
        self._lanes: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Item]:
        for lane in self._lanes.values():
            yield from lane

    @property
    def scopes(self) -> list[str]:
        """Those with items, the one that has waited longest for its turn first."""
        return list(self._lanes)

    @property
    def counts(self) -> dict[str, int]:
        """How many items each scope has."""
        return {scope: len(lane) for scope, lane in self._lanes.items()}

    def append(self, item: Item) -> None:
        self._lane_of(item).append(item)

    def append_left(self, item: Item) -> None:
        self._lane_of(item).appendleft(item)

    def first(self, scope: str) -> Item:
        return self._lanes[scope][0]

    def pop_left(self, scope: str) -> Item:
        """Take a scope's first item; the scope then stands behind the others."""
        lane = self._lanes.pop(scope)
        item = lane.popleft()
        if lane:
            self._lanes[scope] = lane
        return item

    def pop(self, scope: str) -> Item:
        """Take a scope's last item."""
        item = self._lanes[scope].pop()
        if not self._lanes[scope]:
            del self._lanes[scope]
        return item

    def keep(self, is_kept: Callable[[Item], bool]) -> None:
        kept = {scope: deque(filter(is_kept, lane)) for scope, lane in self._lanes.items()}
        self._lanes = {scope: lane for scope, lane in kept.items() if lane}

    def _lane_of(self, item: Item) -> deque[Item]:
        return self._lanes.setdefault(self._scope_of(item), deque())
