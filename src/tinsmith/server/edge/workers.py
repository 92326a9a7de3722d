"""Work that takes long, beside the event loop: owners in turn, none with over half the threads.

Whoever sends much waits behind his own, not others behind his. For bodies there is one thread,
because decoding holds the interpreter's lock: several would only keep the event loop from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_PASS_BYTES = 16 * 1024
"""A pass from this size on takes a millisecond or more to decode, and is decoded here."""

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._busy: Counter[str] = Counter()
        """Threads that each owner has."""
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
                self._threads, lambda: function(*args, **options)
            )
        finally:
            if turn.done() and not turn.cancelled():
                self._busy[owner] -= 1
                self._busy += Counter()  # without those who have none
                self._start_next()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        most = (self._num_threads + 1) // 2
        while self._busy.total() < self._num_threads:
            owner = next((each for each in self._waiting if self._busy[each] < most), None)
            if owner is None:
                return
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.cancelled():
                self._busy[owner] += 1
                turn.set_result(None)
