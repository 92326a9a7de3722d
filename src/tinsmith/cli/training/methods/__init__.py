"""The ways to train: each says what a step learns from, and what tells whether it helps."""

import importlib
from typing import Any

from tinsmith.cli.training.methods.base import Batch, Chart, Method, World

__all__ = ["Batch", "Chart", "Method", "World", "find"]


def find(name: str) -> type[Method[Any, Any]]:
    """The class of a method, imported when it is asked for."""
    found: type[Method[Any, Any]] = importlib.import_module(f"{__name__}.{name}").METHOD
    return found
