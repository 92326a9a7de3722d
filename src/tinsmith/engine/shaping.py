"""How a request changes the choice of tokens: grammars, penalties, biases, min-p.

A sequence's `Shaper` knows which tokens it has seen, and says what that does to the next logits: a
mask of those that its grammar allows (`grammar`), and a short list of edits. An engine applies them
in this order: the mask; biases are added; where a token was seen, the repetition penalty divides a
logit above zero and multiplies one below; the presence and frequency penalties are taken off.
Temperature, min-p, top-k and top-p follow, in that order.

The reported log-probability does not change: it remains the model's own.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tinsmith.engine.base import Shaping
from tinsmith.engine.grammar import Matcher

Number = TypeVar("Number", bound=np.generic)

_FIRST_ROOM = 64


class Edits(NamedTuple):
    """What happens to some logits of one row, no token twice. All of shape (n,)."""

    tokens: npt.NDArray[np.int64]
    added: npt.NDArray[np.float64]
    """Added first."""
    factor: npt.NDArray[np.float64]
    """Then a logit above zero is divided by it, any other multiplied."""
    taken: npt.NDArray[np.float64]
    """Subtracted last."""


class Shaper:
    """What one sequence's next choice is shaped by. Holds each token that it has seen once."""

    def __init__(
        self,
        shaping: Shaping,
        prompt: npt.NDArray[np.int32],
        matcher: Matcher | None = None,
    ) -> None:
        self.shaping = shaping
        self.matcher = matcher
        self._is_counting = bool(shaping.presence_penalty or shaping.frequency_penalty)
        self._is_repeating = shaping.repetition_penalty != 1.0
        self._place_of: dict[int, int] = {}
        self._tokens = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._biases = np.zeros(_FIRST_ROOM)
        self._counts = np.zeros(_FIRST_ROOM)
        """How often a token was sampled."""
        self._is_seen = np.zeros(_FIRST_ROOM, dtype=bool)
        """Whether it was sampled, or is in the prompt."""
        for token, bias in shaping.logit_bias.items():
            self._biases[self._place(token)] = bias
        if self._is_repeating:
            for token in np.unique(prompt).tolist():
                self._is_seen[self._place(token)] = True

    def copy(self) -> Self:
        """Another in the same state: reading a long prompt once serves all of its samples."""
        other = copy(self)
        other.matcher = None if self.matcher is None else self.matcher.copy()
        other._place_of = dict(self._place_of)
        other._tokens, other._biases = self._tokens.copy(), self._biases.copy()
        other._counts, other._is_seen = self._counts.copy(), self._is_seen.copy()
        return other

    def see(self, token: int) -> None:
        """Take note of the sequence's next token."""
        if self.matcher is not None:
            self.matcher.see(token)
        if self._is_counting or self._is_repeating:
            place = self._place(token)
            self._counts[place] += 1
            self._is_seen[place] = True

    def edits(self) -> Edits:
        count = len(self._place_of)
        sampled = self._counts[:count]
        shaping = self.shaping
        return Edits(
            self._tokens[:count],
            self._biases[:count],
            np.where(self._is_seen[:count], shaping.repetition_penalty, 1.0),
            shaping.presence_penalty * (sampled > 0) + shaping.frequency_penalty * sampled,
        )

    def _place(self, token: int) -> int:
        place = self._place_of.setdefault(token, len(self._place_of))
        if place == len(self._tokens):
            self._tokens, self._biases = _doubled(self._tokens), _doubled(self._biases)
            self._counts, self._is_seen = _doubled(self._counts), _doubled(self._is_seen)
        self._tokens[place] = token
        return place


def _doubled(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    return np.concatenate([values, np.zeros_like(values)])
