"""Work on large bodies, beside the event loop: one piece at a time, owners in turn.

One thread, because decoding holds the interpreter's lock: several would only keep the event loop
from getting it. Whoever sends many large bodies waits behind his own, not others behind his.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_PASS_BYTES = 16 * 1024
"""A pass from this size on takes a millisecond or more to decode, and is decoded here."""

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._is_busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner; the one whose turn is next comes first."""

    async def run(
        self, owner: str, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """What `function` gives, in the owner's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._start_next()
        try:
            await turn
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: function(*args, **options)
            )
        finally:
            if turn.done() and not turn.cancelled():
                self._is_busy = False
                self._start_next()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while not self._is_busy and self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.cancelled():
                self._is_busy = True
                turn.set_result(None)
