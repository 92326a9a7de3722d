"""Numbers of an image processor's file, which may come from anywhere: one that no model has is
refused by its name.

Otherwise a server would divide by zero as it counts, or a pixel would become a gigabyte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.engine.local.model.rope import UnsupportedModelError

MOST_SCALED_PIXELS = 2**26
"""Of an image as the tower sees it: four times what published models have."""

MOST_SIDE = 1024
"""Pixels of a patch's side, or patches of a token's."""

_MOST_NUMBER = 2**53


def given(settings: Mapping[str, Any], name: str) -> Any:
    if settings.get(name) is None:
        raise UnsupportedModelError(f"its image processor's settings have no {name!r}")
    return settings[name]


def whole(name: str, value: Any, least: int, most: int) -> int:
    found = number(name, value)
    if not (found.is_integer() and least <= found <= most):
        raise UnsupportedModelError(
            f"its image processor's settings have {value!r} for {name}; known: {least} to {most}"
        )
    return int(found)


def number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < _MOST_NUMBER:
        raise UnsupportedModelError(
            f"its image processor's settings have {str(value)[:40]!r} for {name}, which is no "
            "number that it can mean"
        )
    return float(value)


def three(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    values = given(settings, name)
    if not isinstance(values, list) or len(values) != len("RGB"):
        raise UnsupportedModelError(f"its image processor has no three numbers in {name!r}")
    red, green, blue = (number(name, value) for value in values)
    return red, green, blue


def deviations(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """What the three channels are divided by."""
    found = three(settings, name)
    if 0 in found:
        raise UnsupportedModelError(f"its image processor has 0 for {name}")
    return found


def token_of_images(settings: Mapping[str, Any], name: str) -> int:
    """The token, called `name` in `config.json`, that stands for a part of an image."""
    text = settings.get("text_config")
    vocabulary = (text if isinstance(text, Mapping) else settings).get("vocab_size", 2**31)
    return whole(name, given(settings, name), 0, vocabulary - 1)
