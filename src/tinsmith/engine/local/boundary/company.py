"""Who used the engine a moment ago, and may come back during the next micro-batch.

Programs pause between two requests. One whose micro-batch begins in such a pause is not alone: it
is short then, as it is while the others have work. Counted in micro-batches and not in seconds, so
that ranks, which make the same calls, agree on it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

REMEMBERED_BATCHES = 32
"""Micro-batches for which somebody counts as there since they last sent something."""


class Company:
    def __init__(self) -> None:
        self._num_batches = 0
        self._came_at: dict[str, int] = {}
        """By scope, those who came last at the end."""

    def came(self, scopes: Collection[str]) -> None:
        """Somebody has sent passes or a sampling job."""
        for scope in scopes:
            self._came_at.pop(scope, None)
            self._came_at[scope] = self._num_batches
        for scope in list(takewhile(self._is_long_ago, self._came_at)):
            del self._came_at[scope]

    def batch_ended(self) -> None:
        self._num_batches += 1

    def has_others(self, scopes: Collection[str]) -> bool:
        """Whether somebody else than these came lately."""
        others = (scope for scope in reversed(self._came_at) if scope not in scopes)
        newest = next(others, None)
        return newest is not None and not self._is_long_ago(newest)

    def _is_long_ago(self, scope: str) -> bool:
        return self._num_batches - self._came_at[scope] >= REMEMBERED_BATCHES
