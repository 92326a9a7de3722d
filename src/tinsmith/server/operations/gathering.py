"""Whether the next batch of passes waits a moment for others who are about to come.

Programs train in loops: a pass, a step, the next pass. On a device that takes nearly as long for
a small batch as for a large one, whoever comes a moment too late misses a batch, and then two take
turns where one would do. So a batch waits for models that come back soon, as they did before,
whichever batch they were in. One batch less saves what a batch costs beside its tokens, so the
device stands idle no longer than that for it. Where time goes by tokens
alone, as on a CPU, nobody waits, nor on an idle server. Pure
bookkeeping; the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

LONGEST_SECONDS = 0.1
"""Most time that a batch is held back, and that a model takes to come back which is waited for."""

_LEAST_SECONDS = 0.001
"""Less is not worth the wait."""

_MAX_REMEMBERED = 1024
"""Models whose returns are kept, those that passed last."""

_KEPT = 0.9
"""Weight of all batches before the newest one."""

_LEAST_SPREAD = 0.1
"""Batches must differ in tokens by this part of their mean to tell what a token costs."""


class Gathering:
    def __init__(self) -> None:
        self._costs = _Costs()
        self._returns: dict[str, float] = {}
        """Seconds from the end of a model's batch until it had its next pass ready."""
        self._left_at: dict[str, float] = {}
        """When the batches ended of models that have not come back."""
        self._ended_at = 0.0
        """When the last batch of passes ended."""
        self._idle_at = 0.0
        """When the last work on the device ended, passes or steps."""

    def batch_ended(
        self, model_ids: Collection[str], *, num_tokens: int, seconds: float, at: float
    ) -> None:
        self._costs.add(num_tokens, seconds)
        for model_id in model_ids:
            self._left_at.pop(model_id, None)
            self._left_at[model_id] = at
        self._ended_at = self._idle_at = at
        for known in (self._left_at, self._returns):
            while len(known) > _MAX_REMEMBERED:
                del known[next(iter(known))]

    def steps_ended(self, at: float) -> None:
        self._idle_at = at

    def came(self, model_ids: Iterable[str], at: float) -> None:
        """Models have a pass ready; to be told at once, also while a batch runs, since how soon
        they come is learnt from it."""
        for model_id in model_ids:
            if (left_at := self._left_at.pop(model_id, None)) is not None:
                seconds = at - left_at
                known = self._returns.pop(model_id, seconds)
                self._returns[model_id] = (known + seconds) / 2

    def hold(self, at: float, *, is_stepping: bool = False) -> float:
        """How many seconds those who are ready wait for others; 0 where none is due.

        While steps run the device is not idle, and waiting costs nothing yet.
        """
        gain = min(self._costs.fixed_seconds, LONGEST_SECONDS)
        idle_at = at if is_stepping else self._idle_at
        until = min(idle_at + gain, self._ended_at + LONGEST_SECONDS)
        if at > until - _LEAST_SECONDS:
            return 0.0
        is_due = any(
            # One who is late by more than could be gained is taken to have gone.
            at - gain <= left_at + seconds <= until
            for model_id, left_at in self._left_at.items()
            if (seconds := self._returns.get(model_id, LONGEST_SECONDS)) < LONGEST_SECONDS
        )
        return until - at if is_due else 0.0


@dataclass(slots=True)
class _Costs:
    """What a batch takes, as a line through what the last ones took: so much, and so much a token.
    The sums are over batches, the newest counting most."""

    fixed_seconds: float = 0.0
    is_known: bool = False
    """Whether batches have differed in tokens; until then half of the time is taken to be fixed,
    which makes them differ."""
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.weight = _KEPT * self.weight + 1
        self.tokens = _KEPT * self.tokens + num_tokens
        self.seconds = _KEPT * self.seconds + seconds
        self.squares = _KEPT * self.squares + num_tokens**2
        self.products = _KEPT * self.products + num_tokens * seconds
        mean, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        variance = self.squares / self.weight - mean**2
        if variance < (_LEAST_SPREAD * mean) ** 2 or not variance:
            # Batches of one size do not tell; what was known stays.
            if not self.is_known:
                self.fixed_seconds = mean_seconds / 2
            return
        self.is_known = True
        slope = (self.products / self.weight - mean * mean_seconds) / variance
        self.fixed_seconds = max(0.0, mean_seconds - max(0.0, slope) * mean)
