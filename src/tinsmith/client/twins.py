"""Docstrings of the `_async` twins: each has its sibling's, written once."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)


def documented_twins(cls: C) -> C:
    """For a class whose methods come in pairs, `name` and `name_async`."""
    for name, method in list(vars(cls).items()):
        sibling = getattr(cls, name.removesuffix("_async"), None)
        if name.endswith("_async") and not method.__doc__ and sibling is not None:
            method.__doc__ = sibling.__doc__
    return cls
