"""Sessions: who is here, since when, and what happens when they fall silent.

Signs of life are noted in memory and written down now and then; any request of a session counts.
A silent session's models are put on disk, and come back when they are used again: nobody loses
work to a laptop that slept. A finished session stays finished.

Silence is measured by the monotonic clock: when the time of day jumps, no session counts as silent.
"""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tinsmith.server.config import ServerConfig
from tinsmith.server.operations.live_models import LiveModels
from tinsmith.server.store.errors import OverQuotaError
from tinsmith.server.store.records import SessionRecord
from tinsmith.server.store.sessions import TEXTS
from tinsmith.server.store.store import Remembered, Store
from tinsmith.types import CreateSessionRequest
from tinsmith.wire import json

_KEPT_BYTES = 64 * 1024 * 1024
"""Of sessions in memory, as JSON; others are read again, at each of their requests."""

_RECORD_BYTES = 1024
"""What a session takes beside what its client gave it."""

_FREE_BYTES = 64
"""A text no longer than this counts with the session."""


class Sessions:
    def __init__(self, store: Store, models: LiveModels, config: ServerConfig) -> None:
        self._store = store
        self._models = models
        self._config = config
        self._sessions = Remembered(store.sessions.get, _KEPT_BYTES, _num_bytes)
        self._seen: dict[str, float] = {}
        """When each gave its last sign of life, by the monotonic clock."""
        self._unwritten: set[str] = set()
        self._held: dict[str, _Held] = {}
        """What each owner's sessions take, as far as it was asked for."""

    async def create(self, owner: str, request: CreateSessionRequest) -> SessionRecord:
        now = time.time()
        session = SessionRecord(
            session_id=str(uuid.uuid4()),
            owner=owner,
            created_at=now,
            last_seen_at=now,
            sdk_version=request.sdk_version,
            tags=request.tags,
            user_metadata=request.user_metadata or {},
            project_id=request.project_id,
            display_name=request.display_name,
        )
        async with self._room(owner, _texts(dataclasses.asdict(session)), sessions=1):
            await self._store.sessions.add(session)
        self._seen[session.session_id] = time.monotonic()
        return session

    async def get(self, session_id: str, owner: str) -> SessionRecord | None:
        """The owner's session; None when there is none, or it is somebody else's."""
        return await self._sessions.get(session_id, lambda session: session.owner == owner)

    def touch(self, session_id: str) -> None:
        self._seen[session_id] = time.monotonic()
        self._unwritten.add(session_id)

    def silence(self, session_id: str) -> float:
        """Seconds since the session's last sign of life; infinite where there was none."""
        return time.monotonic() - self._seen.get(session_id, -math.inf)

    async def set(self, session: SessionRecord, values: dict[str, Any]) -> None:
        async with self._room(session.owner, _texts(values)):
            await self._store.sessions.update(session.session_id, values)
        self._sessions.forget(session.session_id)

    async def finish(self, session: SessionRecord, reason: str, detail: str | None) -> None:
        """End a session; the first end counts. Where there is no room for the detail, its
        beginning is kept: an end is never refused."""
        if session.state == "active":
            values = {"state": "finished", "finish_reason": reason, "finish_detail": detail}
            try:
                await self.set(session, values)
            except OverQuotaError:
                await self.set(session, {**values, "finish_detail": _beginning(detail or "")})
        await self._put_away(session.session_id)

    async def sweep(self) -> None:
        """Write down signs of life; put away the models of sessions that gave none for long."""
        unwritten, self._unwritten = self._unwritten, set()
        now, today = time.monotonic(), time.time()
        await self._store.sessions.touch({k: today - (now - self._seen[k]) for k in unwritten})
        for session_id, seen in list(self._seen.items()):
            if now - seen >= self._config.session_timeout_seconds:
                del self._seen[session_id]
                self._sessions.forget(session_id)
                await self._put_away(session_id)

    async def without_samplers(self) -> list[str]:
        """Sessions whose samplers nobody will ask for: they are finished, and nobody has sampled
        for minutes; or they have been silent for very long."""
        now, after_end = time.time(), self._config.finished_sampler_seconds
        found = await self._store.samplers.silent_sessions(
            now - self._config.sampler_retention_seconds, now - after_end
        )
        # What is in memory is newer than what is written.
        return [session_id for session_id in found if self.silence(session_id) >= after_end]

    async def retire_models(self) -> None:
        """Drop the state of models whose sessions have been silent or finished for very long."""
        limit = time.time() - self._config.model_retention_seconds
        for model_id in await self._store.models.forgotten(limit):
            session_id = model_id.partition(":")[0]
            if session_id not in self._seen and not self._models.is_live(model_id):
                await self._store.models.retire(model_id, time.time())

    async def welcome_back(self) -> None:
        """After a start: every active session has its time to show up again."""
        limit = time.time() - self._config.session_timeout_seconds
        for session_id in await self._store.sessions.seen_since(limit):
            self._seen[session_id] = time.monotonic()

    @asynccontextmanager
    async def _room(
        self, owner: str, sizes: dict[str, int], sessions: int = 0
    ) -> AsyncIterator[None]:
        """While something is written that takes the owner's room, and still does if it is there
        afterwards. `sizes` are the bytes of each text; what a text replaces is not counted off."""
        if owner not in self._held:
            self._held.setdefault(owner, _Held(*await self._store.sessions.held_by(owner)))
        held, added = self._held[owner], sum(sizes.values())
        most = self._config.key_max_session_bytes
        if sessions and held.number >= self._config.key_max_sessions:
            raise OverQuotaError(
                f"this owner has {held.number} sessions; the limit is "
                f"{self._config.key_max_sessions} (key_max_sessions)"
            )
        if sizes and held.num_bytes + added > most:
            largest = max(sizes, key=lambda name: sizes[name])
            raise OverQuotaError(
                f"{largest}: has {sizes[largest]} bytes, and the texts in this owner's sessions "
                f"would have {held.num_bytes + added}; the limit is {most} "
                "(key_max_session_bytes). Begin sessions with less metadata, or with none"
            )
        held.add(sessions, added)
        try:
            yield
        except BaseException:
            held.add(-sessions, -added)
            raise

    async def _put_away(self, session_id: str) -> None:
        for model in self._models:
            if model.record.session_id == session_id:
                model.wants_unload = True


@dataclasses.dataclass(slots=True)
class _Held:
    number: int
    num_bytes: int

    def add(self, number: int, num_bytes: int) -> None:
        self.number += number
        self.num_bytes += num_bytes


def _texts(values: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of what a client gave, as JSON, where it is more than a few."""
    sizes = {name: len(json.encode(values[name])) for name in TEXTS if values.get(name)}
    return {name: size for name, size in sizes.items() if size > _FREE_BYTES}


def _beginning(text: str) -> str:
    """As much of a text as counts with the session."""
    kept = text[:_FREE_BYTES]
    while len(json.encode(f"{kept}…")) > _FREE_BYTES:
        kept = kept[:-1]
    return f"{kept}…"


def _num_bytes(session: SessionRecord) -> int:
    return _RECORD_BYTES + sum(_texts(dataclasses.asdict(session)).values())
