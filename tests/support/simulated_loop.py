"""An event loop for simulations: time is a number, and a seed decides what happens next.

Of the callbacks that are ready, any may run first, also where asyncio would keep their order:
more interleavings than a real loop shows in a year, and code that holds in all of them holds in
that one. Nothing waits: when nobody is ready, the clock moves to the next timer. Work for threads
is done on the loop, at a moment of the seed's choosing. A run is repeated exactly by its seed.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any


class Stuck(AssertionError):
    """Somebody waits, and nothing can ever happen any more."""


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, seed: int, max_steps: int = 1_000_000) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.num_steps = 0
        self._max_steps = max_steps
        self._now = 0.0
        self._ready: Any  # callbacks, in the base class's deque
        self._scheduled: Any  # its heap of timers
        self._timer_cancelled_count = 0

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]  # no executor is ever used
        self, executor: None, func: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()

        def work() -> None:
            if future.cancelled() and self.random.random() < 0.5:
                return  # no thread had begun with it yet
            try:
                result, failure = func(*arguments), None
            except Exception as error:
                result, failure = None, error
            if future.cancelled():
                return
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(result)

        self.call_later(self.random.random() * 0.01, work)
        return future

    def _run_once(self) -> None:
        """One callback: what the base class's `run_forever` repeats."""
        while self._scheduled and (
            self._scheduled[0]._cancelled or self._scheduled[0]._when <= self._now
        ):
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            if not timer._cancelled:
                self._ready.append(timer)
        if not self._ready:
            if self._timer_cancelled_count > len(self._scheduled) / 2:
                self._forget_cancelled()
            if not self._scheduled:
                raise Stuck(f"nothing can happen any more after {self.num_steps} steps")
            self._now = self._scheduled[0]._when
            return
        place = int(self.random.random() * len(self._ready))
        handle = self._ready[place]
        del self._ready[place]
        self.num_steps += 1
        if self.num_steps > self._max_steps:
            raise Stuck(f"no end after {self._max_steps} steps")
        if not handle._cancelled and not self.holds(handle):
            handle._run()

    def _forget_cancelled(self) -> None:
        left = [timer for timer in self._scheduled if not timer._cancelled]
        for timer in self._scheduled:
            timer._scheduled = not timer._cancelled
        heapq.heapify(left)
        self._scheduled = left
        self._timer_cancelled_count = 0

    def holds(self, handle: asyncio.Handle) -> bool:
        """Whether a callback's time has come in vain: there is nobody any more to run it, or it is
        run later."""
        return False

    def tasks_left(self) -> set[asyncio.Task[Any]]:
        """Those that have not ended, and still might."""
        return asyncio.all_tasks(self)

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There are no other threads to be woken by."""


def simulate(
    seed: int,
    main: Callable[[random.Random], Coroutine[Any, Any, None]],
    max_steps: int = 1_000_000,
) -> int:
    """Run `main` to its end, with the seed's random numbers; how many steps it took."""
    loop = SimulatedLoop(seed, max_steps)
    run(loop, seed, main)
    return loop.num_steps


def run(
    loop: SimulatedLoop, seed: int, main: Callable[[random.Random], Coroutine[Any, Any, None]]
) -> None:
    """What goes wrong is raised, and so is what a background task or callback left unhandled."""
    trouble: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: trouble.append(context))
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main(loop.random))
        left = [task.get_name() for task in loop.tasks_left()]
        assert not left, f"tasks that nobody waited for: {left}"
    except BaseException as error:
        error.add_note(f"replay with seed {seed}, step {loop.num_steps}")
        for context in trouble:
            error.add_note(f"before that: {context}")
        raise
    finally:
        asyncio.set_event_loop(None)
        for task in loop.tasks_left():
            task.cancel()
        for _ in range(10_000):
            if not loop._ready and not loop.tasks_left():
                break
            if not loop._ready and not loop._scheduled:
                break
            loop.call_soon(loop.stop)
            loop.run_forever()
        loop.close()
    assert not trouble, f"seed {seed}: {trouble}"
