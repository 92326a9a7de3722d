"""Whose fault an error is, for telemetry: a written rule, the official client's.

RequestFailedError, category user                       the user's
anything with a status 400..499 other than 408          the user's (429 too, although retried)
connection errors, timeouts, 5xx, everything else       not
an error raised from, or while handling, one of those   as its cause, then its context
"""

from __future__ import annotations

from tinsmith.errors import RequestFailedError
from tinsmith.types import RequestErrorCategory


def is_user_error(error: BaseException) -> bool:
    return find_user_error(error) is not None


def find_user_error(error: BaseException) -> BaseException | None:
    """The first in the chain of causes that is the user's."""
    pending, seen = [error], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if _is_users_own(each):
            return each
        # The cause is looked at, with all its own causes, before the context.
        pending += [e for e in (each.__context__, each.__cause__) if e is not None]
    return None


def _is_users_own(error: BaseException) -> bool:
    if isinstance(error, RequestFailedError) and error.category is RequestErrorCategory.User:
        return True
    status = getattr(error, "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status != 408
