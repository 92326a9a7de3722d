"""Labels that a caller gives to what it does, carried to the I/O thread by a context variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

_TAGS: ContextVar[Mapping[str, str]] = ContextVar("tinsmith_tags", default=MappingProxyType({}))


@contextmanager
def request_tags(**tags: str) -> Iterator[None]:
    """Operations called inside carry these tags into telemetry events and spans.

    >>> with request_tags(experiment="a"):
    ...     current_tags()["experiment"]
    'a'
    """
    token = _TAGS.set(MappingProxyType({**_TAGS.get(), **tags}))
    try:
        yield
    finally:
        _TAGS.reset(token)


def current_tags() -> Mapping[str, str]:
    return _TAGS.get()
