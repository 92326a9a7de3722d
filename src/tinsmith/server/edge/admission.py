"""How much may be under way at once, so that too much is refused early instead of slowing all.

Requests count from their arrival to their answer; those that only wait for a result do not, they
cost next to nothing. When the event loop itself falls behind, nothing new is let in until it has
caught up; and an owner who sends faster than anybody should has to wait alone.

Large bodies are counted in bytes, because a few of them fill the memory; one owner gets at most
half of that, so nobody can keep the others from sending theirs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

MAX_LAG_SECONDS = 1.0
"""How far the event loop may fall behind before new requests are refused."""

_LOOK_SECONDS = 0.1
_BURST_SECONDS = 2.0
"""For how long an owner may send at twice the rate."""

LARGE_BODY_BYTES = 1024 * 1024
"""Smaller bodies are not counted: there are never more of them than connections."""


@dataclass(slots=True)
class _Allowance:
    """What an owner may still send now; it grows with time."""

    left: float
    at: float


class Admission:
    def __init__(self, max_requests: int, max_body_bytes: int, owner_rate: float) -> None:
        """`owner_rate` is how many requests a second one owner may send for long."""
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        self._owner_rate = owner_rate
        self._allowances: dict[str, _Allowance] = {}
        self._bytes_of: Counter[str] = Counter()
        self.num_requests = 0
        self.lag_seconds = 0.0

    def is_too_fast(self, owner: str) -> bool:
        """Count a request of an owner's; whether it is one too many."""
        now = time.monotonic()
        most = self._owner_rate * _BURST_SECONDS
        allowance = self._allowances.get(owner)
        if allowance is None:
            allowance = self._allowances[owner] = _Allowance(most, now)
        allowance.left = min(most, allowance.left + (now - allowance.at) * self._owner_rate)
        allowance.at = now
        if allowance.left < 1:
            return True
        allowance.left -= 1
        return False

    async def watch_lag(self) -> None:
        """Measure, for ever, how late the event loop gets to its work."""
        while True:
            due = time.monotonic() + _LOOK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            self.lag_seconds = time.monotonic() - due

    def enter(self) -> bool:
        """Count a request in, unless there are too many; who is in must `leave`."""
        if self.num_requests >= self._max_requests or self.lag_seconds > MAX_LAG_SECONDS:
            return False
        self.num_requests += 1
        return True

    def leave(self) -> None:
        self.num_requests -= 1

    def take_bytes(self, owner: str, num_bytes: int) -> bool:
        """Memory for more of an owner's body, unless that is too much; to be given back."""
        taken = self._bytes_of.total()
        is_alone = not self._bytes_of[owner]
        if taken + num_bytes > self._max_body_bytes and not (is_alone and taken == 0):
            return False
        if self._bytes_of[owner] + num_bytes > self._max_body_bytes // 2 and not is_alone:
            return False
        self._bytes_of[owner] += num_bytes
        return True

    def give_back_bytes(self, owner: str, num_bytes: int) -> None:
        self._bytes_of[owner] -= num_bytes
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]

    @property
    def body_bytes(self) -> int:
        return self._bytes_of.total()
