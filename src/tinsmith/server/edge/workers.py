"""Work that takes long, beside the event loop: owners in turn, none with over half the threads.

An owner who sends much waits behind work of their own, and others do not. For bodies there is one
thread, because decoding holds the interpreter's lock: several would only keep the event loop from
it.
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
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_threads = num_threads
        self._busy: Counter[str] = Counter()
        """Threads that each owner has."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner; the one whose turn is next comes first."""

    async def run(
        self, owner: str, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """What `function` gives, in the owner's turn.

        A thread is the owner's until the function has returned, also when nobody waits for it any
        more: disconnecting gives an owner no more threads.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._start_next()
        try:
            await turn
            work = loop.run_in_executor(self._threads, lambda: function(*args, **options))
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._leave(owner)
            raise
        work.add_done_callback(lambda _: self._leave(owner))
        try:
            return await asyncio.shield(work)
        finally:
            # An error would keep this frame and the frame, by this name, the error; with them stays
            # what `function` was given, until the next search for garbage.
            del work

    def close(self, *, wait: bool = False) -> None:
        """Nothing begins any more; `wait` for what is under way."""
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _leave(self, owner: str) -> None:
        self._busy[owner] -= 1
        self._busy += Counter()  # without those who have none
        self._start_next()

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
