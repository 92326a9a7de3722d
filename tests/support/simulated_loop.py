"""An event loop for simulations: time is a number, and a seed decides what happens next.

Of the callbacks that are ready, any may run first, also where asyncio would keep their order:
more interleavings than a real loop shows in a year, and code that holds in all of them holds in
that one. Nothing waits: when nobody is ready, the clock moves to the next timer. Work for threads
is done on the loop, at a moment of the seed's choosing. A run is repeated exactly by its seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any


class Stuck(AssertionError):
    """Somebody waits, and nothing can ever happen any more."""


running_loop: Callable[[], Any] = asyncio._get_running_loop
"""This thread's loop, if it is in the middle of one: a simulated one has the time as `_now`."""


class Callback(asyncio.TimerHandle):
    """Something to be run, now or at a time. A simulation makes millions of them, so it is no more
    than the fields that asyncio reads."""

    __slots__ = ()

    def __init__(
        self,
        loop: SimulatedLoop,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self._loop = loop
        self._when = when
        self._callback = callback
        self._args = args
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = self._repr = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, seed: int, max_steps: int = 1_000_000) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.num_steps = 0
        self._max_steps = max_steps
        self._now = 0.0
        self._num_timers = 0
        self._ready: list[Callback] = []
        self._scheduled: list[tuple[float, int, Callback]] = []
        """A heap of timers; of two for the same moment the first comes first."""

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # as asyncio's, without the types of the arguments
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Callback:
        handle = Callback(self, self._now, callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no other threads

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Callback:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Callback:
        handle = Callback(self, when, callback, args, context)
        self._num_timers += 1
        heapq.heappush(self._scheduled, (when, self._num_timers, handle))
        return handle

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
        """Callback after callback, until somebody stops the loop: what the base class's
        `run_forever` calls."""
        ready, draw, holds = self._ready, self.random.random, self.holds
        while not self._stopping:
            timers = self._scheduled
            while timers and timers[0][0] <= self._now:
                timer = heapq.heappop(timers)[2]
                if not timer._cancelled:
                    ready.append(timer)
            if not ready:
                self._pass_time()
                continue
            place = int(draw() * len(ready))
            handle = ready[place]
            ready[place] = ready[-1]
            ready.pop()
            self.num_steps += 1
            if self.num_steps > self._max_steps:
                raise Stuck(f"no end after {self._max_steps} steps")
            if not handle._cancelled and not holds(handle):
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    what = {"message": f"in {handle}", "exception": error, "handle": handle}
                    self.call_exception_handler(what)

    def _pass_time(self) -> None:
        """To the next moment at which something happens."""
        timers = self._scheduled
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck(f"nothing can happen any more after {self.num_steps} steps")
        self._now = timers[0][0]

    def holds(self, handle: Callback) -> bool:
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
