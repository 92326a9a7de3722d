"""How much of the engine's time each owner has had, and each of their models.

The unit is seconds. Before a pass runs it counts with what its tokens are expected to take, and
afterwards with what it took: a loss that sorts costs more than one that adds. An owner who
was idle saves up no turns, and begins where those who are being served stand. Pure bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_low

_FIRST_GUESS = 1e-4
"""Seconds a token takes, as long as nothing has been measured."""

_RECENT = 0.2
"""Weight of the newest measurement in a moving average."""

_MAX_REMEMBERED = 4096
_MAX_OWNERS = 100
"""Owners whose rates are kept, those who trained last."""


class Shares:
    def __init__(self) -> None:
        self._owners = _Account()
        self._models: dict[str, _Account] = {}
        self._rates: dict[str, dict[str, float]] = {}
        """Seconds per token by base model and owner."""
        self._usual: dict[str, float] = {}

    def of_owner(self, owner: str) -> float:
        return self._owners.of(owner)

    def of_model(self, owner: str, model_id: str) -> float:
        """What the model has had; comparable among the models of one owner."""
        account = self._models.get(owner)
        return 0.0 if account is None else account.of(model_id)

    def charge(self, owner: str, model_id: str, seconds: float) -> None:
        """Count time for a model; a negative amount gives back what was expected too much."""
        self._owners.add(owner, seconds)
        self._models.setdefault(owner, _Account()).add(model_id, seconds)

    def advance(self, owner: str, model_id: str) -> None:
        """It is this model's turn; nobody who comes now may claim an earlier one."""
        self._owners.advance(owner)
        account = self._models.setdefault(owner, _Account())
        account.advance(model_id)
        if len(self._models) > _MAX_REMEMBERED:
            # An owner who has had no more than those being served begins where they are.
            kept = {name: a for name, a in self._models.items() if self._owners.is_ahead(name)}
            self._models = {**kept, owner: account}

    def usual_seconds(self, base_model: str, num_tokens: int) -> float:
        """What so many tokens take on a base model with the owner in the middle: no single one can
        make the unusual usual."""
        return self._usual.get(base_model, _FIRST_GUESS) * max(1, num_tokens)

    def measured(self, base_model: str, owner: str, num_tokens: int, seconds: float) -> None:
        """An ordinary pass took so long."""
        rate = seconds / max(1, num_tokens)
        rates = self._rates.setdefault(base_model, {})
        rates[owner] = moved(rates.pop(owner, rate), rate)
        if len(rates) > _MAX_OWNERS:
            del rates[next(iter(rates))]
        self._usual[base_model] = median_low(rates.values())


def moved(average: float, newest: float) -> float:
    """A moving average after one more measurement."""
    return (1 - _RECENT) * average + _RECENT * newest


@dataclass(slots=True)
class _Account:
    had: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    """What the one had who was served last: where newcomers begin."""

    def of(self, name: str) -> float:
        return max(self.now, self.had.get(name, 0.0))

    def add(self, name: str, seconds: float) -> None:
        self.had[name] = self.of(name) + seconds

    def advance(self, name: str) -> None:
        self.now = self.of(name)
        if len(self.had) > _MAX_REMEMBERED:
            self.had = {each: had for each, had in self.had.items() if had > self.now}

    def is_ahead(self, name: str) -> bool:
        return self.had.get(name, 0.0) > self.now
