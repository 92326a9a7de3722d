"""Tokens counted per owner and hour: in memory first, then added to the store now and then."""

from __future__ import annotations

import time
from collections import defaultdict

from tinsmith.server.store.records import UsageRecord
from tinsmith.server.store.store import Store


class Usage:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: dict[tuple[str, int, str, str, str, str], int] = defaultdict(int)

    def count(
        self,
        owner: str,
        base_model: str,
        session_id: str,
        kind: str,
        amount: int,
        model_id: str = "",
    ) -> None:
        """`model_id` is the run that it was for, where there is one."""
        if amount:
            hour = int(time.time() // 3600)
            self._counts[owner, hour, base_model, session_id, kind, model_id] += amount

    async def flush(self) -> None:
        counts, self._counts = self._counts, defaultdict(int)
        entries = [
            UsageRecord(
                owner=owner,
                hour=hour,
                base_model=base_model,
                session_id=session_id,
                kind=kind,
                count=count,
                model_id=model_id,
            )
            for (owner, hour, base_model, session_id, kind, model_id), count in counts.items()
        ]
        if not entries:
            return
        try:
            await self._store.account.add_usage(entries)
        except Exception:
            for key, count in counts.items():
                self._counts[key] += count
            raise
