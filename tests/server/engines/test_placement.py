"""The choice between slots: where models go, where samples go, and what choosing takes."""

from __future__ import annotations

import asyncio
import runpy
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tinsmith.engine.fake import FakeEngine
from tinsmith.server.engines.placement import (
    SAMPLING_SLACK,
    SamplingPlace,
    TrainingPlace,
    sampling_slot,
    training_slot,
)
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.sampling.loaded import LoadedSamplers

if TYPE_CHECKING:
    from tinsmith.engine.base import Engine

PLACEMENTS = Path(__file__).parents[3] / "benchmarks" / "placements.py"


def training(
    number: int,
    *,
    is_up: bool = True,
    num_active: int = 0,
    num_models: int = 0,
    has_base: bool = False,
) -> TrainingPlace[int]:
    return TrainingPlace(
        number,
        number,
        is_up=is_up,
        num_active=num_active,
        num_models=num_models,
        has_base=has_base,
    )


def sampling(
    number: int, *, is_up: bool = True, num_jobs: int = 0, has_weights: bool = False
) -> SamplingPlace[int]:
    return SamplingPlace(number, number, is_up=is_up, num_jobs=num_jobs, has_weights=has_weights)


@pytest.mark.parametrize(
    ("places", "chosen"),
    [
        ([training(0, num_active=1), training(1)], 1),
        ([training(0), training(1, has_base=True)], 1),
        ([training(0, num_active=2, has_base=True), training(1, num_active=1)], 1),
        ([training(0, num_models=9), training(1, num_models=3)], 1),
        ([training(0, is_up=False), training(1, num_active=5)], 1),
        ([training(0), training(1)], 0),
    ],
    ids=["fewest at work", "base in use", "work before base", "fewest idle", "up", "first"],
)
def test_a_model_goes_where_the_fewest_work(places: list[TrainingPlace[int]], chosen: int) -> None:
    assert training_slot(places) == chosen


def test_a_sample_goes_to_its_weights_unless_they_have_much_more_to_do() -> None:
    prefixes = [b"%d" % number for number in range(50)]
    at_home = [sampling(0, num_jobs=SAMPLING_SLACK, has_weights=True), sampling(1)]
    assert {sampling_slot(at_home, prefix) for prefix in prefixes} == {0}
    crowded = [sampling(0, num_jobs=SAMPLING_SLACK + 1, has_weights=True), sampling(1)]
    assert {sampling_slot(crowded, prefix) for prefix in prefixes} == {1}
    gone = [sampling(0, is_up=False, has_weights=True), sampling(1)]
    assert {sampling_slot(gone, prefix) for prefix in prefixes} == {1}


def test_a_slot_that_goes_moves_only_the_prompts_that_were_sampled_there() -> None:
    places = [sampling(number) for number in range(4)]
    prefixes = [b"prompt %d" % number for number in range(400)]
    before = {prefix: sampling_slot(places, prefix) for prefix in prefixes}
    counts = [list(before.values()).count(number) for number in range(4)]
    assert min(counts) > 60, "they are spread"
    after = {prefix: sampling_slot(places[:3], prefix) for prefix in prefixes}
    assert all(after[prefix] == slot for prefix, slot in before.items() if slot != 3)


async def test_who_comes_while_a_server_starts_does_not_crowd_into_the_quickest_slot() -> None:
    fails = asyncio.Event()

    async def start(plan: SlotPlan) -> Engine:
        if plan.number == 0:
            await fails.wait()
            raise RuntimeError("no such device")
        return FakeEngine()

    async def nothing() -> None: ...

    plans = [SlotPlan(number=number) for number in range(2)]
    pool = EnginePool(
        plans, start, nothing, lambda: LoadedSamplers(lambda name: nullcontext(Path(name)), 1)
    )
    new_model = runpy.run_path(str(PLACEMENTS))["new_model"]
    await pool.start()
    async with asyncio.timeout(10):
        await pool.slots[1].get()
        assert pool.training_slot(new_model(1)) is pool.slots[0]
        fails.set()
        while pool.slots[0].is_expected:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
    assert pool.training_slot(new_model(2)) is pool.slots[1]
    await pool.close()


def test_choosing_among_64_slots_with_2000_models_takes_about_a_millisecond() -> None:
    """The measure of `benchmarks/engines.py`; the bound allows for a busy machine."""
    seconds = runpy.run_path(str(PLACEMENTS))["decision_seconds"](64, 2000, 100)
    assert statistics.median(seconds) < 0.01
