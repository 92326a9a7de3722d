"""How much of the training time each scope has had lately."""

from __future__ import annotations

from collections.abc import Collection

REMEMBERED_SECONDS = 0.25
"""When so much has been counted, all of it counts half."""

_LIGHT = 0.5
"""Part of the mean of all scopes up to which somebody has had little."""

_ALONE_SECONDS = 0.02
"""Most that counts of the time of who was alone: it has kept nobody waiting."""

_NOTHING_SECONDS = 0.0005
"""Who has had no more is as one who has not been there."""


class RecentUse:
    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def add(self, scope: str, seconds: float) -> None:
        had = self._had.get(scope, 0.0) + seconds
        is_alone = not self._had.keys() - {scope}
        self._had[scope] = min(had, _ALONE_SECONDS) if is_alone else had
        while sum(self._had.values()) > REMEMBERED_SECONDS:
            halves = {each: had / 2 for each, had in self._had.items()}
            self._had = {s: had for s, had in halves.items() if had > _NOTHING_SECONDS}

    def is_light(self, scopes: Collection[str]) -> bool:
        """Whether each of these has had far less than its even part; nobody has who is alone."""
        others = [scope for scope in self._had if scope not in scopes]
        if not others:
            return False
        mean = sum(self._had.values()) / (len(others) + len(set(scopes)))
        return all(self._had.get(scope, 0.0) < _LIGHT * mean for scope in scopes)
