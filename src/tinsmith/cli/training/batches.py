"""Which part of the data is trained on, and which of it a step sees."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def split(items: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """What to train on and what to hold out; the same for the same seed."""
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    num_held_out = round(len(items) * fraction)
    if fraction > 0 and num_held_out == 0 and len(items) > 1:
        num_held_out = 1
    held_out = set(order[:num_held_out])
    return (
        [each for i, each in enumerate(items) if i not in held_out],
        [each for i, each in enumerate(items) if i in held_out],
    )


def num_steps(num_items: int, batch_size: int, epochs: float) -> int:
    return max(1, math.ceil(num_items * epochs / batch_size))


def digest(items: Sequence[Any]) -> str:
    """A short text that differs when any item does: other data, or another tokenizer."""
    content = json.dumps([asdict(each) for each in items], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class Batches(Generic[T]):
    """The items of each step. Each epoch has an order of its own, known from its number."""

    def __init__(self, items: Sequence[T], size: int, seed: int) -> None:
        self._items = items
        self._size = size
        self._seed = seed
        self._epoch, self._order = -1, [0]

    def of_step(self, step: int) -> list[T]:
        return [self._at(n) for n in range(step * self._size, (step + 1) * self._size)]

    def _at(self, position: int) -> T:
        epoch, index = divmod(position, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._items)))
            random.Random(f"{self._seed} {epoch}").shuffle(self._order)
        return self._items[self._order[index]]
