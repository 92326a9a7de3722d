"""Futures that plain code can block on and async code can await, from any loop.

    output = training.forward_backward(batch, "cross_entropy").result()
    output = await training.forward_backward(batch, "cross_entropy")

A future resolves once. A timeout (`result(timeout=5)`) loses nothing: the operation goes on, and
its result can be asked for again. Cancelling is explicit: `future.cancel()`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tinsmith.client.uplink.loop import AwaitableFuture, is_io_thread, mailbox_of
from tinsmith.types.model import shorten

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
F = TypeVar("F", bound="APIFuture[Any] | Future[Any]")


class APIFuture(ABC, Generic[T]):
    """The result of an operation, some time from now.

    >>> done: Future[int] = Future()
    >>> done.set_result(3)
    >>> AwaitableConcurrentFuture(done).result()
    3
    """

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109
        """Wait without blocking; `TimeoutError` after `timeout` seconds."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Block until the result is there; `TimeoutError` after `timeout` seconds."""

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> Future[T]:
        """The same as a `concurrent.futures.Future`."""
        raise NotImplementedError(f"{type(self).__name__} has no concurrent future")

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self.future().done()

    def cancel(self) -> bool:
        """Give up on the operation, unless it is done. A queued one is not sent; a sample that
        was sent is cancelled at the service, if that supports it."""
        return self.future().cancel()

    def add_done_callback(self, callback: Callable[[APIFuture[T]], object]) -> None:
        """Call `callback(self)` when the result or the error is there, at once if it is already.

        It runs on the client's I/O thread: keep it short and do not block in it.
        """
        self.future().add_done_callback(lambda _: callback(self))


class AwaitableConcurrentFuture(APIFuture[T]):
    """An `APIFuture` over a `concurrent.futures.Future`."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __repr__(self) -> str:
        if not self._future.done():
            state = "under way"
        elif self._future.cancelled():
            state = "cancelled"
        elif (error := self._future.exception()) is not None:
            state = f"failed: {shorten(error)}"
        else:
            state = f"done: {shorten(self._future.result())}"
        return f"<{type(self).__name__} {state}>"

    def result(self, timeout: float | None = None) -> T:
        if not self._future.done():
            explain_blocking("result()", "await the future")
        try:
            return self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise  # the operation's own
            raise _impatient(timeout) from None

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109
        # Waiting is apart from the operation: a waiter may be cancelled or time out without ending
        # it.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        mailbox = mailbox_of(loop)
        self._future.add_done_callback(lambda done: mailbox.post(lambda: _hand_over(done, waiter)))
        if timeout is None:
            return await waiter
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        except TimeoutError:
            if self._future.done():
                raise
            raise _impatient(timeout) from None

    def future(self) -> Future[T]:
        return self._future

    def map(self, change: Callable[[T], U]) -> AwaitableConcurrentFuture[U]:
        """A future for `change(result)`; cancelling it cancels this one."""
        mapped: AwaitableFuture[U] = AwaitableFuture()

        def resolve(source: Future[T]) -> None:
            if mapped.cancelled():
                return
            if source.cancelled():
                mapped.cancel()
                return
            mapped.set_running_or_notify_cancel()
            try:
                mapped.set_result(change(source.result()))
            except BaseException as error:
                mapped.set_exception(error)

        def pass_on(target: Future[U]) -> None:
            if target.cancelled():
                self._future.cancel()

        self._future.add_done_callback(resolve)
        mapped.add_done_callback(pass_on)
        return AwaitableConcurrentFuture(mapped)


class as_completed(Generic[F]):
    """Futures in the order in which they finish, for plain and async loops.

    for future in as_completed(futures): print(future.result())
    async for future in as_completed(futures): print(await future)
    """

    def __init__(self, futures: Iterable[F], timeout: float | None = None) -> None:
        self._futures = list(futures)
        self._timeout = timeout

    def __iter__(self) -> Iterator[F]:
        arrived: queue.SimpleQueue[F] = queue.SimpleQueue()
        for future in self._futures:
            _when_done(future, arrived.put)
        for _ in self._futures:
            try:
                yield arrived.get(timeout=self._timeout)
            except queue.Empty:
                raise TimeoutError(f"no future finished within {self._timeout} s") from None

    async def __aiter__(self) -> AsyncIterator[F]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[F] = asyncio.Queue()
        for future in self._futures:
            _when_done(future, lambda it: loop.call_soon_threadsafe(arrived.put_nowait, it))
        for _ in self._futures:
            async with asyncio.timeout(self._timeout):
                future = await arrived.get()
            yield future


def _impatient(timeout: float | None) -> TimeoutError:
    return TimeoutError(
        f"no result within {timeout} s; the operation goes on, ask for its result again"
    )


def _hand_over(done: Future[T], waiter: asyncio.Future[T]) -> None:
    if waiter.done():
        return
    if done.cancelled():
        waiter.cancel()
    elif (error := done.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(done.result())


def _when_done(future: F, tell: Callable[[F], object]) -> None:
    inner = future if isinstance(future, Future) else future.future()
    inner.add_done_callback(lambda _: tell(future))


def explain_blocking(what: str, instead: str) -> None:
    """Blocking inside an event loop stops that loop; on the client's own it would never end."""
    if is_io_thread():
        raise RuntimeError(
            f"{what} was called on the client's I/O thread (in a callback?) and would wait for "
            f"itself; {instead}"
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not _is_notebook():
        logger.warning(
            "%s blocks a running event loop until it returns; %s instead.",
            what,
            instead,
            stacklevel=3,
        )


def _is_notebook() -> bool:
    # A notebook runs every cell inside a loop; blocking there is what its user means.
    try:
        from builtins import get_ipython  # type: ignore[attr-defined]  # put there by IPython
    except ImportError:
        return False
    return type(get_ipython()).__name__ in ("ZMQInteractiveShell", "Shell")


def resolved(value: T) -> AwaitableConcurrentFuture[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return AwaitableConcurrentFuture(future)
