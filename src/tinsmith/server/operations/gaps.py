"""How long operations have waited for a number that has not arrived.

Time counts by a clock that nobody sets, and only while this process looks: a laptop that slept, or
a server that was stopped, has not kept anybody waiting for a client that slept as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tinsmith.server.operations.live_model import LiveModel

_MOST_AT_ONCE_SECONDS = 2.0
"""More than this between two looks is time in which nothing ran here."""


class GapWatch:
    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._looked_at = clock()

    def over(self, models: Iterable[LiveModel]) -> list[LiveModel]:
        """The models whose operations have waited for too long; to be called every second or so."""
        now = self._clock()
        elapsed = min(max(0.0, now - self._looked_at), _MOST_AT_ONCE_SECONDS)
        self._looked_at = now
        return [model for model in models if self._has_waited(model, elapsed)]

    def _has_waited(self, model: LiveModel, elapsed: float) -> bool:
        is_idle = not model.is_busy and not model.num_recording
        is_waiting = is_idle and len(model.queue) > 0 and model.queue.head() is None
        awaited = model.queue.next_seq_id if is_waiting else None
        if awaited != model.awaited_seq_id:
            # Another number: one gap may end and the next begin between two looks.
            model.awaited_seq_id, model.gap_seconds = awaited, 0.0
        model.gap_seconds += elapsed
        return is_waiting and model.gap_seconds >= self._timeout_seconds
