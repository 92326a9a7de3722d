"""Sequence ids and turns, without a client."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from tinsmith.client.calls.turns import Turns


def test_ids_are_dense_when_a_hundred_threads_reserve_at_once() -> None:
    """S30"""
    turns, taken, barrier = Turns(), list[int](), threading.Barrier(100)

    def reserve() -> None:
        barrier.wait()
        taken.extend(turns.reserve(3))

    threads = [threading.Thread(target=reserve) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 301))


async def test_turns_come_in_order_of_ids_whatever_the_order_of_tasks() -> None:
    """S31"""
    turns, left = Turns(), list[int]()

    async def leave(seq_id: int) -> None:
        async with turns.take(seq_id):
            await asyncio.sleep(0)
            left.append(seq_id)

    ids = turns.reserve(20)
    await asyncio.gather(*(leave(seq_id) for seq_id in reversed(ids)))
    assert left == list(ids)


async def test_requests_of_one_operation_share_a_turn() -> None:
    """S32: only the chunks of one call overlap."""
    turns = Turns()
    first, second, third, after = turns.reserve(4)
    open_now, most = 0, 0

    async def leave(seq_id: int, group: int | None) -> None:
        nonlocal open_now, most
        async with turns.take(seq_id, after=group):
            open_now += 1
            most = max(most, open_now)
            if seq_id == after:
                assert open_now == 1
            await asyncio.sleep(0.01)
            open_now -= 1

    await asyncio.gather(
        leave(after, None), leave(third, first), leave(second, first), leave(first, first)
    )
    assert most == 3


@pytest.mark.parametrize("when", ["waiting", "sending"])
async def test_a_cancelled_turn_lets_the_next_one_through(when: str) -> None:
    """S39"""
    turns = Turns()
    first, second, third = turns.reserve(3)
    held = asyncio.Event()

    async def leave(seq_id: int, *, hold: bool = False) -> int:
        async with turns.take(seq_id):
            if hold:
                await held.wait()
            return seq_id

    blocker = asyncio.create_task(leave(first, hold=True))
    queued = asyncio.create_task(leave(second))
    last = asyncio.create_task(leave(third))
    await asyncio.sleep(0)
    victim = queued if when == "waiting" else blocker
    victim.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await victim
    held.set()
    assert await asyncio.wait_for(last, 20) == third


async def test_a_failed_turn_lets_the_next_one_through() -> None:
    """S38"""
    turns = Turns()
    first, second = turns.reserve(2)
    with pytest.raises(ZeroDivisionError):
        async with turns.take(first):
            raise ZeroDivisionError
    async with asyncio.timeout(20), turns.take(second):
        pass


async def test_a_turn_that_never_began_can_be_ended_from_outside_and_twice() -> None:
    turns = Turns()
    first, second = turns.reserve(2)
    turns.finish(first)
    turns.finish(first)
    async with asyncio.timeout(20), turns.take(second):
        pass
    assert turns.is_finished(second)
