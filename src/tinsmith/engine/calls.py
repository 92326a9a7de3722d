"""The calls of the engine interface as data, read off their one declaration (`base.Engine`).

Code that carries calls (to a process, over a network, to one of several engines) goes by this table
and knows no call by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.engine.base import Engine


@dataclass(frozen=True, slots=True)
class Call:
    """One call: how it is answered, and when."""

    name: str
    signature: inspect.Signature
    is_stream: bool
    """Whether it is answered with a stream of results instead of one."""

    is_at_once: bool
    """Whether it is answered whatever is queued."""

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What was passed, in the order of declaration; a `TypeError` where it does not fit."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def argument(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """One of those arguments by name; None where the call has no such argument."""
        return dict(zip(self.signature.parameters, arguments, strict=True)).get(name)


def _declared(engine: type[Engine]) -> Mapping[str, Call]:
    calls = {}
    for name, method in inspect.getmembers(engine, inspect.isfunction):
        # Closing is the end of the connection, not a message on it.
        if name.startswith("_") or name == "close":
            continue
        signature = inspect.signature(method)
        calls[name] = Call(
            name=name,
            signature=signature.replace(parameters=list(signature.parameters.values())[1:]),
            is_stream=not inspect.iscoroutinefunction(method),
            is_at_once=getattr(method, "is_at_once", False),
        )
    return calls


CALLS = _declared(Engine)
