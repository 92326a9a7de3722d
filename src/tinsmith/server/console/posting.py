"""Metrics that clients post beside a run's own, within what an owner may keep."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.errors import ValidationError
from tinsmith.server.store.records import StepRecord
from tinsmith.server.store.store import Store


class Posted:
    def __init__(self, store: Store, max_owner_bytes: int) -> None:
        self._store = store
        self._max_owner_bytes = max_owner_bytes
        self._bytes: dict[str, int] = {}
        """What each owner's metrics take, as far as it was asked for."""

    async def post(self, owner: str, step: StepRecord, metrics: Mapping[str, float]) -> StepRecord:
        """Record metrics under a step; refused when the owner's take too much room."""
        if owner not in self._bytes:
            self._bytes.setdefault(owner, await self._store.steps.posted_bytes(owner))
        if self._bytes[owner] >= self._max_owner_bytes:
            raise ValidationError(
                f"your metrics take {self._bytes[owner]} bytes; the limit is "
                f"{self._max_owner_bytes} (key_max_posted_bytes); post fewer or rarer ones",
                "metrics",
            )
        recorded = await self._store.steps.post(step, metrics)
        self._bytes[owner] += len(recorded.metrics)
        return recorded
