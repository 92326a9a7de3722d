"""How much may be under way at once, so that too much is refused early instead of slowing all.

Requests count from their arrival to their answer; those that only wait for a result do not, they
cost next to nothing. Bodies count in bytes, from the first one on. Of both an owner has a share.
When the event loop itself falls behind, owners with more than a few requests under way are refused
until it has caught up; and an owner who sends too fast is slowed down alone.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tinsmith.server.edge.shares import Shares

MAX_LAG_SECONDS = 1.0
"""How far the event loop may fall behind before new requests are refused..."""

FEW_REQUESTS = 4
"""... to owners with this many under way. Others get in, or one could shut out all."""

_LOOK_SECONDS = 0.1
_BURST_SECONDS = 2.0
"""For how long an owner may send at twice the rate."""


@dataclass(slots=True)
class _Allowance:
    """What an owner may still send now; it grows with time."""

    left: float
    at: float


class Admission:
    def __init__(self, max_requests: int, max_body_bytes: int, owner_rate: float) -> None:
        """`owner_rate` is how many requests a second one owner may send for long."""
        self.requests = Shares(max_requests)
        self.body_bytes = Shares(max_body_bytes)
        self._owner_rate = owner_rate
        self._allowances: dict[str, _Allowance] = {}
        self.lag_seconds = 0.0
        self.penalty_seconds = 1.0
        """Shortest delay of a request beyond the rate; it may be three times as long, so that they
        do not all come back at once."""

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

    def enter(self, owner: str) -> bool:
        """Count a request in, unless its owner has too many; one that was let in must `leave`."""
        if self.lag_seconds > MAX_LAG_SECONDS and self.requests.of(owner) >= FEW_REQUESTS:
            return False
        return self.requests.take(owner)

    def leave(self, owner: str) -> None:
        self.requests.give_back(owner)
