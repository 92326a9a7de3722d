"""The owner for whom the present work is done, where that decides whose turn it is.

Noted where a request is let in and where an operation begins, and known to everything that they
call. What the server does for itself has no owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_OWNER: ContextVar[str] = ContextVar("owner", default="")


@contextlib.contextmanager
def working_for(owner: str) -> Iterator[None]:
    token = _OWNER.set(owner)
    try:
        yield
    finally:
        _OWNER.reset(token)


def owner_at_work() -> str:
    """The owner this is done for; "" for the server itself."""
    return _OWNER.get()
