"""Saying that a name is on its way out, or not settled yet."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ExperimentalWarning(FutureWarning):
    """The thing called may change or go away in any release."""


def warns(message: str, category: type[Warning]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Warn on every call, naming the caller's line."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(message, category, stacklevel=2)
            return function(*args, **kwargs)

        # From Python 3.12 on a wrapper can say that it gives a coroutine.
        mark = getattr(inspect, "markcoroutinefunction", None)
        if mark is not None and inspect.iscoroutinefunction(function):
            mark(warning)
        return warning

    return decorate
