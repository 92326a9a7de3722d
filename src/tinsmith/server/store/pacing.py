"""When the next commit begins: at once while few write, and in company while many do.

What a commit costs beside its writes (a transaction, the system's calls, waking two threads) is
about half of what an operation costs. On a fast disk it is over before the next write
comes, so each write would pay for one of its own. So where writes come thick and fast, commits
begin a few milliseconds apart, and each carries what came meanwhile. A program that waits for each
answer before it sends the next request never writes that often; and where several such programs
are held up, they write less often, and are held up no longer. Pure bookkeeping; the clock is the
caller's.
"""

from __future__ import annotations

import math

APART_SECONDS = 0.004
"""From the beginning of one commit to that of the next, while many write."""

MANY = 1500
"""Writes a second that are many."""

_RECENT_SECONDS = 0.05
"""How far back writes are counted, the older ones less."""


class Pacing:
    def __init__(self) -> None:
        self._began_at = -math.inf
        self._recent = 0.0
        """Writes of the last `_RECENT_SECONDS`, as of the last commit."""

    def wait(self, at: float) -> float:
        """Seconds until a commit may begin."""
        if self._recent_at(at) < MANY * _RECENT_SECONDS:
            return 0.0
        return max(0.0, self._began_at + APART_SECONDS - at)

    def begin(self, num_writes: int, at: float) -> None:
        """A commit begins with so many writes."""
        self._recent = self._recent_at(at) + num_writes
        self._began_at = at

    def _recent_at(self, at: float) -> float:
        return self._recent * math.exp((self._began_at - at) / _RECENT_SECONDS)
