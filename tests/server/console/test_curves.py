"""Curves of any length in a few hundred points: nothing is lost but detail, and quickly."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.contract.store_rows import MODEL, operation
from tinsmith.server.store import schema
from tinsmith.server.store.database import sqlite_url
from tinsmith.server.store.observing.blocks import SIZES
from tinsmith.server.store.records import Finish, StepRecord
from tinsmith.server.store.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.in_process_server import Api, TestServer
    from tinsmith.server.store.observing.blocks import Summary

RUN = MODEL.model_id
Point = tuple[int, dict[str, float | str]]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(sqlite_url(tmp_path / "tinsmith.db"), tmp_path / "blobs")
    await store.log.record(operation(0), MODEL)
    await store.log.finish([Finish(request_id="r0", status="done", finished_at=0.0)])
    yield store
    await store.close()


async def _record(store: Store, points: Sequence[Point]) -> None:
    """As operations that ended."""
    numbers = [number for number, _ in points]
    await asyncio.gather(*(store.log.record(operation(n, payload=None)) for n in numbers))
    await store.log.finish([_end(number, json.dumps(metrics)) for number, metrics in points])


def _end(number: int, metrics: str = "{}", model_id: str = RUN) -> Finish:
    at = float(number)
    step = StepRecord(model_id, number, at, "forward_backward", metrics=metrics)
    return Finish(request_id=f"r{number}", status="done", finished_at=at, step=step)


async def _trim(store: Store, up_to: int) -> None:
    """Let operations leave the log up to a number, as if a snapshot were there."""
    await store.models.update(RUN, {"previous_snapshot_seq_id": up_to})
    await store.retention.trim(keep=0, ended_before=math.inf)


def _check(summaries: list[Summary], points: Sequence[Point], most: int) -> None:
    """Each summary against the points between the one before and itself, the slow way."""
    assert len(summaries) <= most
    before = -1
    for summary in summaries:
        inside = [metrics for number, metrics in points if before < number <= summary.x]
        before = summary.x
        names = {name for metrics in inside for name in metrics}
        assert summary.ranges.keys() == names
        for name in names:
            values = [m[name] for m in inside if isinstance(m.get(name), float)]
            count, mean, least, greatest = summary.ranges[name]
            assert count == len(values)
            assert (least, greatest) == ((min(values), max(values)) if values else (None, None))
            assert mean is None if not values else math.isclose(mean, sum(values) / len(values))
    if points:
        assert before == points[-1][0], "the newest point is there"


@pytest.mark.parametrize("seed", range(4))
async def test_a_thinned_curve_has_the_means_and_extremes_of_all_its_points(
    store: Store, seed: int
) -> None:
    chance = random.Random(seed)
    points: list[Point] = []
    number = 0
    for _ in range(12):
        added: list[Point] = []
        for _ in range(chance.randrange(1, 120)):
            number += chance.choice([1, 1, 1, 2, 40])
            metrics: dict[str, float | str] = {"loss": chance.uniform(-5, 5)}
            if chance.random() < 0.1:
                metrics["loss"] = "NaN"
            if chance.random() < 0.3:
                metrics["rare"] = chance.uniform(0, 1)
            added.append((number, metrics))
        await _record(store, added)
        points += added
        if chance.random() < 0.7:
            await store.curves.draw(RUN, "operation")
        if chance.random() < 0.3:
            await _trim(store, chance.randrange(number))
        for most in (1, 3, 10, 100, 5000):
            _check(await store.curves.read(RUN, "operation", -1, most), points, most)
        after = chance.randrange(number)
        rest = [point for point in points if point[0] > after]
        _check(await store.curves.read(RUN, "operation", after, 10), rest, 10)


@pytest.mark.parametrize("length", [3000, pytest.param(15_000, marks=pytest.mark.slow)])
async def test_a_run_of_any_length_is_shown_in_a_tenth_of_a_second(
    store: Store, length: int
) -> None:
    """Also where a picture is made of the steps themselves, which are partly in the log."""
    names = ("loss", *map(str, range(9)))
    points: list[Point] = [(n, dict.fromkeys(names, float(n))) for n in range(1, length)]
    for start in range(0, length, 1000):
        await _record(store, points[start : start + 1000])
    await _trim(store, length // 2)
    await store.curves.draw(RUN, "operation")
    best = math.inf
    for _ in range(3):
        began = time.process_time()
        found = await store.curves.read(RUN, "operation", -1, 500)
        best = min(best, time.process_time() - began)
    _check(found, points, 500)
    assert best < 0.1, f"{best:.3f} s"
    print(f"{length} steps: {best:.3f} s")


async def test_a_few_steps_are_left_as_they_are(store: Store) -> None:
    """To keep blocks of a short run costs more than to read it."""
    points: list[Point] = [(number, {"loss": 1.0}) for number in range(1, 101)]
    await _record(store, points)

    async def num_marks() -> int:
        return len(await store.database.column(sa.select(schema.step_marks.c.up_to)))

    await store.curves.draw(RUN, "operation", least=102)
    assert await num_marks() == 0
    await store.curves.draw(RUN, "operation", least=101)
    assert await num_marks() == 1
    _check(await store.curves.read(RUN, "operation", -1, 7), points, 7)


async def test_a_posted_step_that_comes_late_changes_the_curve(store: Store) -> None:
    points: list[Point] = [(number, {"reward": float(number)}) for number in range(0, 4000, 2)]

    async def post(number: int, metrics: Any) -> None:
        step = StepRecord(RUN, number, float(number), "posted", source="posted")
        await store.steps.post(step, metrics)

    await asyncio.gather(*(post(number, metrics) for number, metrics in points))
    await store.curves.draw(RUN, "posted")
    late = StepRecord(model_id=RUN, source="posted", seq_id=700, at=0.0, kind="posted")
    await store.steps.post(late, {"reward": 1e6})
    new = StepRecord(model_id=RUN, source="posted", seq_id=701, at=0.0, kind="posted")
    await store.steps.post(new, {"other": 1.0})
    told: list[Point] = sorted({**dict(points), 700: {"reward": 1e6}, 701: {"other": 1.0}}.items())
    for most in (1, 7, 50, 5000):
        _check(await store.curves.read(RUN, "posted", -1, most), told, most)


async def test_steps_before_a_pending_operation_alone_are_drawn_together(
    server: TestServer, api: Api
) -> None:
    """Of two operations the second may fail first; the first must not be left out for that."""
    run, store = await api.model(), server.service.store
    for number in range(1, 20):
        await api.result(await api.send_pass(run, number))
    waiting = await api.send_pass(run, 21)
    await store.log.record(operation(40, model_id=run))
    await store.log.finish([_end(40, model_id=run)])
    await store.curves.draw(run, "operation")
    await api.send_pass(run, 20)
    await api.result(waiting)
    for number in range(22, 40):
        await api.result(await api.send_pass(run, number))
    await store.curves.draw(run, "operation")
    found = await store.curves.read(run, "operation", -1, 1)
    assert found[0].ranges["loss"][0] == 39


MILLION = 1_000_000


@pytest.mark.slow
async def test_a_million_steps_are_shown_in_a_tenth_of_a_second(
    server: TestServer, api: Api
) -> None:
    """Steps and blocks are filled in by SQL: to write a million steps takes minutes."""
    run, store = await api.model(), server.service.store
    names = ("loss", "kl", *map(str, range(18)))
    steps = sa.text(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :many) "
        "INSERT INTO steps (entry_id, model_id, source, seq_id, at, kind, status, num_tokens, "
        "wait_seconds, run_seconds, metrics) SELECT i + 1, :run, 'operation', i, i, "
        "'forward_backward', 'done', 4, 0.0, 0.0, :metrics FROM n"
    )
    metrics = json.dumps(dict.fromkeys(names, 1.5))
    summary = json.dumps({name: [32, 1.5, 0.5, 2.5] for name in names})
    # Smaller blocks than these are looked at where the larger ones are not complete, at the end.
    blocks = [
        {"model_id": run, "source": "operation", "size": size, "block": block}
        | {"summary": f"[{(block + 1) * size - 1}, 0.0, {summary}]"}
        for size in SIZES[2:]
        for block in range(MILLION // size)
    ]
    mark = {"model_id": run, "source": "operation", "up_to": MILLION // SIZES[2] * SIZES[2]}

    def write(connection: sa.Connection) -> None:
        connection.execute(steps, {"many": MILLION, "run": run, "metrics": metrics})
        connection.execute(sa.insert(schema.step_blocks), blocks)
        connection.execute(sa.insert(schema.step_marks), mark)

    await store.database.write(write)
    best = math.inf
    for _ in range(5):
        # This process's own time, asking and answering: others may be at work on this machine.
        began = time.process_time()
        response = await api.get(f"/training_runs/{run}/metrics", points=500)
        best = min(best, time.process_time() - began)
    loss = response.json()["series"]["loss"]
    assert 200 < len(loss["x"]) <= 500 and loss["x"][-1] == MILLION
    assert (loss["min"][7], loss["mean"][7], loss["max"][7]) == (0.5, 1.5, 2.5)
    assert best < 0.1, f"{best:.3f} s"
    print(f"a million steps: {best:.3f} s")
