"""The I/O thread: one event loop per process, on which every operation of every client runs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.errors import TinkerError
from tinsmith.transport.http import Http

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_SECONDS = 2.0
SETTLE_SECONDS = 0.02
"""Time for the HTTP library's threads to release their Python objects, again and again while one
of them is at work; it has no call to wait for."""


class IoThread:
    """Starts when first needed, from any thread; ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._is_ending = False

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is None or self._process != os.getpid():
            with self._lock:
                loop = self._start()
        return loop

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None:
            if self._process == os.getpid():
                return self._loop
            # The HTTP library's threads did not survive the fork either, so a new loop would
            # only hang later and less clearly.
            raise TinkerError(
                "this process was forked from one that had already used the client; start worker "
                "processes with the 'spawn' or 'forkserver' method, or fork before the first use"
            )
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tinsmith-io", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        return self._loop

    def _run(self) -> None:
        assert self._loop is not None, "set before the thread starts"
        asyncio.set_event_loop(self._loop)
        while not self._is_ending:
            try:
                self._loop.run_forever()
            except BaseException:
                # SystemExit in a task ends run_forever; waiters for other tasks must not hang.
                logger.exception("The I/O loop was interrupted and goes on.")

    def _end(self) -> None:
        """End every request before the interpreter ends: the HTTP library's threads must not call
        into a Python that is gone."""
        if self._loop is None or self._process != os.getpid():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(END_SECONDS)
        self._is_ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
        until = time.monotonic() + END_SECONDS
        is_settled = False
        while not is_settled and time.monotonic() < until:
            time.sleep(SETTLE_SECONDS)
            is_settled = not _is_library_at_work()


def _is_library_at_work() -> bool:
    """Whether a thread of the HTTP library runs, or waits for a processor; on other systems than
    Linux nobody tells."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            if name.startswith("tokio") and rest.split()[0] == "R":
                return True
    return False


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for http in tuple(Http.opened):
        await http.close()


_THREAD = IoThread()


def io_loop() -> asyncio.AbstractEventLoop:
    return _THREAD.loop()


class AwaitableFuture(Future[T]):
    """A `concurrent.futures.Future` that can be awaited too; cancelling the await cancels it."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


def submit(operation: Coroutine[Any, Any, T]) -> AwaitableFuture[T]:
    """Run on the I/O thread, in the order of calls; context variables of the caller come along."""
    try:
        loop = io_loop()
    except TinkerError:
        operation.close()
        raise
    future: AwaitableFuture[T] = AwaitableFuture()
    context = contextvars.copy_context()
    mailbox_of(loop).post(lambda: _start(loop, operation, future, context))
    return future


def is_io_thread() -> bool:
    """Whether the caller runs on the I/O loop, where waiting for it would never end."""
    try:
        return asyncio.get_running_loop() is _THREAD._loop
    except RuntimeError:
        return False


def _start(
    loop: asyncio.AbstractEventLoop,
    operation: Coroutine[Any, Any, T],
    future: Future[T],
    context: contextvars.Context,
) -> None:
    if future.cancelled():
        operation.close()
        return
    task = loop.create_task(operation, context=context)

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            future.cancel()
        elif future.set_running_or_notify_cancel():
            error = task.exception()
            if error is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)
        else:
            task.exception()  # the caller gave up: nobody is left to tell

    def pass_on(future: Future[T]) -> None:
        if future.cancelled() and not task.done():
            loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(finish)
    future.add_done_callback(pass_on)


class Mailbox:
    """Calls handed to a loop by other threads, many with one wake-up, which is what costs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], None]] = deque()
        self._is_awake = False

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._is_awake:
            return
        loop = self._loop()
        if loop is None:
            return
        try:
            self._is_awake = True
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            pass  # the loop is closed: nobody is left to tell
        except BaseException:
            # Ctrl-C may have come before the loop was woken, so the next post wakes it.
            self._is_awake = False
            raise

    def _run(self) -> None:
        self._is_awake = False  # first: what is posted from here on wakes the loop again
        for _ in range(len(self._calls)):
            try:
                self._calls.popleft()()
            except Exception:
                logger.exception("A call from another thread failed.")


_MAILBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)
_MAILBOXES_LOCK = threading.Lock()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    with _MAILBOXES_LOCK:
        mailbox = _MAILBOXES.get(loop)
        if mailbox is None:
            mailbox = _MAILBOXES[loop] = Mailbox(loop)
        return mailbox
