"""The death of a process at one of its writes, played within this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tinsmith import disk
from tinsmith.server.store.database import Database


class KilledError(BaseException):
    """Ends everything, as the death of a process does."""


class Death:
    """Kills the process before or after its nth write; a dead process writes nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, moment: int, functions: Sequence[str]) -> None:
        """`functions` are those of `disk` that count as writes, beside a commit."""
        self._left = moment
        for name in functions:
            patch.setattr(disk, name, self._deadly(getattr(disk, name)))
        write = Database.write

        async def deadly_write(database: Database, change: Callable[..., Any]) -> Any:
            self._pass()
            result = await write(database, change)
            self._pass()
            return result

        patch.setattr(Database, "write", deadly_write)

    def _deadly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def deadly(*args: Any) -> Any:
            self._pass()
            result = function(*args)
            self._pass()
            return result

        return deadly

    def _pass(self) -> None:
        if self._left == 0:
            raise KilledError
        self._left -= 1
