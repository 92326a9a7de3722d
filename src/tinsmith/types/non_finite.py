"""Infinity and not-a-number in JSON, which has no form for them: as words.

A pass that diverged has a result like any other, and its client must be able to read it. Protobuf
carries such numbers as they are. In JSON, these words are what every release of the official client
reads as floats: all refuse null, and those that parse with orjson refuse the bare tokens.
Requests have no words: a client that would send such a number is told so before it is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class NonFinite:
    """Marks a number that may come as one of the words."""


ResultFloat = Annotated[float, NonFinite()]
"""A number of a result, whatever it is."""


def to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def array_to_json(values: npt.NDArray[Any]) -> npt.NDArray[Any] | list[float | str]:
    """A flat array as it is, which the encoder writes directly, or a list with words in it."""
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return values
    return [to_json(value) for value in values.tolist()]


def from_json(value: Any) -> Any:
    """The number that a word stands for; anything else as it is."""
    return WORDS.get(value, value) if isinstance(value, str) else value
