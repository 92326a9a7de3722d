"""What the messages have in common: map entries, absent fields, and where a complaint arose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tinsmith.errors import ValidationError
from tinsmith.wire.protobuf import NUMBER, Field, Writer, as_message, as_text

T = TypeVar("T")

ABSENT = (0, 0)
"""Where a field that was left out lies: nowhere."""
ZERO = (0, NUMBER)
"""A number that was left out."""


def at(path: str, function: Callable[..., T], *args: Any) -> T:
    """Call, and let a complaint say where in the message it arose."""
    try:
        return function(*args)
    except ValidationError as error:
        raise error.under(path) from None


def entry_of(name: str) -> Writer:
    """A map entry with its key; the value is for the caller to add as field 2."""
    entry = Writer()
    entry.text(1, name)
    return entry


def read_entry(body: bytes, start: int, stop: int) -> tuple[str, int, int]:
    """A map entry: its key, and where its value lies (nowhere if it was left out)."""
    name, value = "", ABSENT
    for number, begin, end in as_message(body, start, stop):
        if number == 1:
            name = as_text(body, begin, end)
        elif number == 2:
            value = (begin, end)
    return name, *value


def by_number(found: list[Field]) -> dict[int, tuple[int, int]]:
    return {number: (start, stop) for number, start, stop in found}
