"""Lists for which the protocol has no pages: all at once, within bounds, or a part of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from starlette.requests import Request

from tinsmith.errors import ValidationError
from tinsmith.server.edge.http import query_int

R = TypeVar("R")

LONGEST_LIST = 10_000
"""Most items of one answer."""

LONGEST_LIST_BYTES = 16 * 1024 * 1024
"""Most bytes of metadata in one."""


async def listed(
    request: Request, read: Callable[[int, int], Awaitable[Sequence[R]]], cure: str
) -> Sequence[R]:
    """All of a list, or with `limit` and `offset` a part of it; `read` is given both.

    Where all are more than one answer takes, it is refused: nothing is cut off in silence.
    """
    limit = query_int(request, "limit", LONGEST_LIST + 1, least=1, most=LONGEST_LIST)
    found = await read(limit, query_int(request, "offset", 0, most=2**53))
    if len(found) > LONGEST_LIST:
        problem = f"there are more than {LONGEST_LIST}, which is the most of one answer"
        raise ValidationError(f"{problem}; {cure}", "limit")
    return found


def check_listed_bytes(num_bytes: int) -> None:
    if num_bytes > LONGEST_LIST_BYTES:
        raise ValidationError(
            f"the metadata in the answer would have {num_bytes} bytes or more, and at most "
            f"{LONGEST_LIST_BYTES} go into one; ask for a part with limit and offset",
            "limit",
        )
