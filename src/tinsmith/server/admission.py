"""How much may be under way at once, so that too much is refused early instead of slowing all.

Requests count from their arrival to their answer; those that only wait for a result do not, they
cost next to nothing. Large bodies are counted in bytes, because a few of them fill the memory; one
owner gets at most half of that, so nobody can keep the others from sending theirs.
"""

from __future__ import annotations

from collections import Counter

LARGE_BODY_BYTES = 1024 * 1024
"""Smaller bodies are not counted: there are never more of them than connections."""


class Admission:
    def __init__(self, max_requests: int, max_body_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        self._bytes_of: Counter[str] = Counter()
        self.num_requests = 0

    def enter(self) -> bool:
        """Count a request in, unless there are too many; who is in must `leave`."""
        if self.num_requests >= self._max_requests:
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
