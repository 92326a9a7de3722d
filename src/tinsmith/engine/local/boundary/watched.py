"""`WatchedEngine`: a remote engine whose signs of life are looked at.

An engine that hangs holds up everybody whose models it has, and closes no socket. What ends it, a
signal or a closed connection, is for a subclass to know.
"""

from __future__ import annotations

import asyncio
import dataclasses

from tinsmith.engine.base import Health
from tinsmith.engine.local.boundary.messages import Beat, Reply
from tinsmith.engine.local.boundary.remote import RemoteEngine
from tinsmith.errors import EngineDiedError

HEALTH_SECONDS = 1.0
"""Most time to wait for the engine's own view; a long turn keeps it from answering."""

WATCH_SECONDS = 1.0
"""How often the caller looks at the engine's signs of life."""


class WatchedEngine(RemoteEngine):
    def __init__(self) -> None:
        super().__init__()
        self._last_health = Health(alive=True)
        self._is_silent_for = 0.0
        self._beat: Beat | None = None

    async def health(self) -> Health:
        """The engine's view; the last known one, marked busy, while a long turn delays it."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                self._last_health = await super().health()
        except TimeoutError:
            detail = f"busy: no answer within {HEALTH_SECONDS:g} s"
            return dataclasses.replace(self._last_health, detail=detail)
        except EngineDiedError as error:
            return Health(alive=False, detail=str(error))
        return self._last_health

    def message_received(self, message: list[Reply]) -> None:
        self._is_silent_for = 0.0
        for reply in message:
            if isinstance(reply, Beat):
                self._beat = reply
        super().message_received(message)

    async def hangs(self, silence_seconds: float) -> str:
        """Wait until the engine hangs; how it does. Silence is counted by looks and not by the
        clock: after this process has been stopped for a while itself, the other has not been
        silent for long."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._is_silent_for += WATCH_SECONDS
            beat = self._beat
            if self._is_silent_for > silence_seconds:
                return f"gave no sign of life for {silence_seconds:g} s"
            if beat is not None and beat.turn_seconds > beat.patience_seconds:
                return f"has been busy with {beat.what} for {beat.turn_seconds:.0f} s"
