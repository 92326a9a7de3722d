"""Futures: resolved once, waited for in any way, never lost to impatience."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future

import pytest

from tinsmith.client.futures import APIFuture, AwaitableConcurrentFuture, as_completed, resolved
from tinsmith.client.uplink.loop import io_loop, submit


async def later(value: int, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return value


def api(value: int, seconds: float = 0.0) -> AwaitableConcurrentFuture[int]:
    return AwaitableConcurrentFuture(submit(later(value, seconds)))


def test_impatience_does_not_lose_the_result() -> None:
    """S42"""
    future = api(3, 0.2)
    with pytest.raises(TimeoutError, match="goes on"):
        future.result(timeout=0.01)
    assert future.result() == 3
    assert future.result() == 3


async def test_impatience_does_not_lose_the_result_in_async_code() -> None:
    """S41, S42"""
    future = api(3, 0.2)
    with pytest.raises(TimeoutError, match="goes on"):
        await future.result_async(timeout=0.01)
    waiting = asyncio.create_task(future.result_async())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await future == 3
    assert await future == 3


def test_a_future_can_be_awaited_from_any_loop() -> None:
    future = api(4, 0.05)

    async def wait() -> int:
        return await future

    assert [asyncio.run(wait()), asyncio.run(wait())] == [4, 4]


def test_an_operations_own_timeout_is_not_taken_for_impatience() -> None:
    async def fail() -> None:
        raise TimeoutError("inside")

    future = AwaitableConcurrentFuture(submit(fail()))
    with pytest.raises(TimeoutError, match="inside"):
        future.result(timeout=5)


def test_callbacks_get_the_future_once_it_is_done() -> None:
    seen: list[APIFuture[int]] = []
    told = threading.Event()
    future = api(5, 0.02)

    def note(done: APIFuture[int]) -> None:
        seen.append(done)
        told.set()

    future.add_done_callback(note)
    assert told.wait(2) and seen == [future]
    assert seen[0].result() == 5


def test_futures_as_they_finish() -> None:
    futures = [api(1, 0.2), api(2, 0.02), api(3, 0.1)]
    assert [future.result() for future in as_completed(futures)] == [2, 3, 1]


async def test_futures_as_they_finish_in_async_code() -> None:
    futures = [api(1, 0.2), api(2, 0.02), api(3, 0.1)]
    assert [await future async for future in as_completed(futures)] == [2, 3, 1]
    plain = [future.future() for future in futures]
    assert {future.result() async for future in as_completed(plain)} == {1, 2, 3}


def test_waiting_for_the_first_has_its_limit_too() -> None:
    with pytest.raises(TimeoutError):
        list(as_completed([api(1, 0.5)], timeout=0.01))


def test_blocking_inside_an_event_loop_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    """`result()` in async code stops the loop it runs in."""

    async def mistake() -> int:
        return api(1, 0.05).result()

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(mistake()) == 1
    assert "blocks a running event loop" in caplog.text and "await" in caplog.text


def test_blocking_on_the_io_thread_is_refused_instead_of_hanging() -> None:
    async def deadlock() -> int:
        return api(1, 0.05).result()

    with pytest.raises(RuntimeError, match="would wait for itself"):
        submit(deadlock()).result(5)


def test_changing_a_result_keeps_errors_and_cancellation() -> None:
    assert api(2).map(lambda value: value * 10).result() == 20
    with pytest.raises(ZeroDivisionError):
        api(0).map(lambda value: 1 / value).result()
    source = api(1, 5.0)
    mapped = source.map(str)
    assert mapped.cancel()
    deadline = time.monotonic() + 30
    while not source.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.future().cancelled()


def test_a_subclass_needs_only_the_two_official_methods() -> None:
    class Mine(APIFuture[int]):
        async def result_async(self, timeout: float | None = None) -> int:  # noqa: ASYNC109
            return 1

        def result(self, timeout: float | None = None) -> int:
            return 1

    async def wait() -> int:
        return await Mine()

    assert asyncio.run(wait()) == 1
    with pytest.raises(NotImplementedError, match="Mine"):
        Mine().done()


def test_fifty_threads_start_one_loop() -> None:
    """S76"""
    from tinsmith.client.uplink.loop import IoThread

    shared, loops, barrier = IoThread(), list[object](), threading.Barrier(50)

    def start() -> None:
        barrier.wait()
        loops.append(shared.loop())

    threads = [threading.Thread(target=start) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, loops))) == 1
    loop = shared.loop()
    assert asyncio.run_coroutine_threadsafe(later(1, 0), loop).result(5) == 1


def test_an_exit_in_the_loop_does_not_strand_those_who_wait() -> None:
    """S40, S80: the loop goes on, and what broke it reaches only its own caller."""
    waiting = api(7, 0.2)

    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        submit(leave()).result(5)
    assert waiting.result(5) == 7
    io_loop().call_soon_threadsafe(io_loop().stop)
    assert api(8).result(5) == 8


def test_a_done_future_needs_no_loop() -> None:
    done: Future[int] = resolved(1).future()
    assert done.done()
