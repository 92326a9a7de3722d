"""Promises: who waits for a result, and how long results are kept."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import pytest

from tinsmith.server.futures import Outcome, Promises

if TYPE_CHECKING:
    pass


async def test_a_promise_wakes_everybody_who_waits_and_resolves_once() -> None:
    """S41."""
    promises = Promises(max_bytes=100)
    promise = promises.open("r", "o")
    waiting = [asyncio.create_task(promises.wait(promise, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    promises.resolve("r", Outcome(body=b"first"), 1.0)
    promises.resolve("r", Outcome(body=b"second"), 2.0)
    outcomes = await asyncio.gather(*waiting)
    assert [o.body for o in outcomes if o] == [b"first"] * 3


async def test_results_beyond_the_bytes_are_let_go_fetched_ones_first() -> None:
    promises = Promises(max_bytes=100)
    for number in range(3):
        promises.open(str(number), "o")
    for number in range(2):
        promises.resolve(str(number), Outcome(body=b"x" * 45), float(number))
    fetched = promises.get("1")
    assert fetched is not None
    promises.mark_retrieved(fetched, 5.0)
    promises.resolve("2", Outcome(body=b"x" * 45), 2.0)
    assert promises.get("1") is None
    assert promises.get("0") is not None and promises.nbytes == 90


@pytest.mark.parametrize("seed", range(20))
def test_who_takes_an_even_part_keeps_all_his_results_whatever_others_do(seed: int) -> None:
    """Others finish, fetch and forget results of any size; his are there, and as they were."""
    rng = random.Random(seed)
    greedy = [f"greedy {number}" for number in range(rng.randint(1, 5))]
    promises = Promises(max_bytes=1000)
    kept = {f"modest {n}": bytes([n]) * 10 for n in range(1000 // (len(greedy) + 1) // 10)}
    waiting = list(kept)
    theirs = []
    for number in range(2000):
        if waiting and rng.random() < 0.1:
            name = waiting.pop()
            promises.open(name, "modest")
            promises.resolve(name, Outcome(body=kept[name]), float(number))
        owner, name = rng.choice(greedy), f"{number}"
        promise = promises.open(name, owner)
        promises.resolve(name, Outcome(body=bytes(rng.choice([0, 5, 50, 500, 5000]))), number)
        theirs.append(promise)
        promises.mark_retrieved(rng.choice(theirs), float(number))
        promises.forget([rng.choice(theirs).request_id])
        assert promises.nbytes <= 1000
    assert not waiting
    found = {name: promises.get(name) for name in kept}
    assert {n: p and p.outcome and p.outcome.body for n, p in found.items()} == kept


async def test_thousands_of_open_questions_are_cheap() -> None:
    promises = Promises(max_bytes=1000)
    all_promises = [promises.open(str(n), "o") for n in range(5000)]
    waiting = [asyncio.create_task(promises.wait(p, 30)) for p in all_promises]
    await asyncio.sleep(0)
    started = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - started < 0.1, "waiting must not burn CPU"
    promises.close()
    assert await asyncio.gather(*waiting) == [None] * 5000
