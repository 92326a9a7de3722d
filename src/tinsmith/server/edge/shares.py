"""Shares of something limited: an owner may hold as much as is still free.

One owner alone gets half of it, two get a third each, and whatever they do, there is room for the
next one. No owner has to be known beforehand, and nothing is kept for those who want nothing.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self.total = 0

    def take(self, owner: str, amount: int = 1) -> bool:
        """Count `amount` in for an owner, unless that is more than the share; to be given back.

        Something larger than any share is let in when nobody holds anything.
        """
        if not self.fits(owner, amount):
            return False
        self.add(owner, amount)
        return True

    def fits(self, owner: str, amount: int = 1) -> bool:
        return not self.total or self.of(owner) + amount <= self._most - self.total

    def add(self, owner: str, amount: int = 1) -> None:
        """Count in what has been let in already."""
        self._held[owner] += amount
        self.total += amount

    def give_back(self, owner: str, amount: int = 1) -> None:
        self.total -= amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    def of(self, owner: str) -> int:
        """What an owner holds now."""
        return self._held.get(owner, 0)
