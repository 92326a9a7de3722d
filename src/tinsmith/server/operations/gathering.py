"""Whether the next batch of passes waits a moment for those who were in the last one.

Programs train in loops: a pass, a step, the next pass. On a device that takes nearly as long for
a small batch as for a large one, whoever comes a moment too late misses a batch, and then two take
turns where one would do. So a batch waits for models that come back soon, as they did before, and
no longer than a batch costs beside its tokens: that is what it saves. Where time goes by tokens
alone, as on a CPU, nobody waits, nor on an idle server. Pure
bookkeeping; the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

LONGEST_SECONDS = 0.1
"""Most time that a batch is held back."""

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
        self._last: frozenset[str] = frozenset()
        """Who was in the batch that ended last."""
        self._held_until = 0.0

    def batch_ended(
        self, model_ids: Collection[str], *, num_tokens: int, seconds: float, at: float
    ) -> None:
        self._costs.add(num_tokens, seconds)
        for model_id in model_ids:
            self._left_at.pop(model_id, None)
            self._left_at[model_id] = at
        self._last = frozenset(model_ids)
        self._held_until = at + min(self._costs.fixed_seconds, LONGEST_SECONDS)
        for known in (self._left_at, self._returns):
            while len(known) > _MAX_REMEMBERED:
                del known[next(iter(known))]

    def hold(self, ready: Collection[str], at: float) -> float:
        """How many seconds the models that are ready wait for others; 0 where none is due."""
        for model_id in ready:
            if (left_at := self._left_at.pop(model_id, None)) is not None:
                self._note_return(model_id, at - left_at)
        if not ready or at > self._held_until - _LEAST_SECONDS:
            return 0.0
        is_due = any(
            self._left_at[model_id] + self._returns[model_id] <= self._held_until
            for model_id in self._last
            if model_id in self._left_at and model_id in self._returns
        )
        return self._held_until - at if is_due else 0.0

    def _note_return(self, model_id: str, seconds: float) -> None:
        known = self._returns.pop(model_id, seconds)
        self._returns[model_id] = (known + seconds) / 2


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
