"""Cutting a call's data into chunks that each fit one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinsmith.types import Datum


def split(data: Sequence[Datum], *, max_items: int, max_bytes: int) -> Iterator[list[Datum]]:
    """Yield consecutive chunks of `data` that each fit one request.

    A datum above `max_bytes` still gets a chunk of its own: whether it is too
    large is for the server to say, and its answer names the limit.
    """
    run: list[Datum] = []
    size = 0
    for datum in data:
        nbytes = datum.nbytes
        if run and (len(run) == max_items or size + nbytes > max_bytes):
            yield run
            run, size = [], 0
        run.append(datum)
        size += nbytes
    if run:
        yield run
