"""Budgets and the gate, with a clock of their own."""

from __future__ import annotations

import asyncio
import contextlib

from tinsmith.transport.limits import ByteBudget, SampleGate


async def test_bytes_in_flight_stay_within_the_budget_plus_one_request() -> None:
    """S49"""
    budget, held, most = ByteBudget(100), 0, 0

    async def work(size: int) -> None:
        nonlocal held, most
        async with budget.hold(size):
            held += size
            most = max(most, held)
            await asyncio.sleep(0)
            held -= size

    await asyncio.gather(*(work(30) for _ in range(1000)))
    assert held == 0 and 100 <= most <= 130


async def test_one_that_is_too_large_goes_alone() -> None:
    budget = ByteBudget(10)
    async with budget.hold(1000):
        waiting = asyncio.create_task(_hold(budget, 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 20)


async def test_a_cancelled_waiter_passes_its_place_on() -> None:
    """S39"""
    budget = ByteBudget(10)
    async with budget.hold(20):
        waiting = [asyncio.create_task(_hold(budget, 20)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    for task in waiting[1:]:
        await asyncio.wait_for(task, 20)
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[0]


async def _hold(budget: ByteBudget, size: int) -> None:
    async with budget.hold(size):
        await asyncio.sleep(0)


async def test_the_gate_opens_when_the_pause_is_over_and_large_requests_pause_longer() -> None:
    """S58, S61"""
    now = 100.0
    gate = SampleGate(1 << 20, now=lambda: now)
    assert not gate.is_throttled
    gate.back_off(1000)
    assert gate.closed_until == 101.0
    gate.back_off(128 * 1024 + 1)
    assert gate.closed_until == 105.0
    gate.back_off(1000, server_delay_seconds=0.5)
    assert gate.closed_until == 105.0, "a shorter pause does not end a longer one"
    assert gate.is_throttled
    now = 114.9
    assert gate.is_throttled
    now = 115.1
    assert not gate.is_throttled
    await asyncio.wait_for(gate.wait_until_open(), 1)


async def test_the_gate_admits_so_many_and_no_more() -> None:
    """S66"""
    gate, inside, most = SampleGate(1 << 30, max_requests=7), 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with gate.admit(1):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(100)))
    assert most == 7
