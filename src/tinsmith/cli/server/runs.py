"""Runs as they are now, for commands that show them: a curve, the speed, the queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.cli.failures import CommandError
from tinsmith.client.rest import RestClient
from tinsmith.client.uplink.api import Api
from tinsmith.errors import NotFoundError
from tinsmith.types import TrainingRun
from tinsmith.types.observing import RunOperation, RunQueueResponse, Series
from tinsmith.wire import endpoints

LOSS = "loss"

_ACTIVE_SECONDS = 60
_OPERATIONS = 20
"""The last seconds, over which the speed is measured."""
_RUNS = 100
"""How many of the newest runs are read; those with the last requests are shown."""


@dataclass(frozen=True, slots=True)
class RunNow:
    run: TrainingRun
    metrics: Sequence[str]
    """The names of all its metrics."""
    curve: Series | None
    """Of the requested metric; None when it has no point."""
    tokens_per_second: float | None
    """While it computes; None when it is idle."""
    queue: RunQueueResponse

    @property
    def values(self) -> list[float]:
        """The curve's; NaN for what is not finite."""
        means = self.curve.mean if self.curve else []
        return [math.nan if value is None else value for value in means]

    @property
    def status(self) -> str:
        if self.run.corrupted:
            return "Failed"
        if self.queue.waiting and self.queue.place:
            return f"Waiting, place {self.queue.place}"
        is_active = time.time() - self.run.last_request_time.timestamp() < _ACTIVE_SECONDS
        return "Training" if self.queue.waiting or is_active else "Idle"


def read(
    client: RestClient, run_id: str, *, metric: str = LOSS, points: int, after: int = -1
) -> RunNow:
    """A run with the curve of a metric beyond `after`, in at most so many points."""
    run = client.get_training_run(run_id).result()
    holder = client.holder
    return holder.submit(lambda: _now(holder.api, run, metric, points, after)).result()


def latest(client: RestClient, limit: int, *, points: int) -> list[RunNow]:
    """The runs with the last requests, each with the curve of its loss."""
    runs = client.list_training_runs(limit=_RUNS).result().training_runs
    runs = sorted(runs, key=lambda run: run.last_request_time, reverse=True)[:limit]
    holder = client.holder

    async def read_all() -> list[RunNow]:
        found = (_now(holder.api, run, LOSS, points, -1) for run in runs)
        return await asyncio.gather(*found)

    return holder.submit(read_all).result()


def speed(operations: Sequence[RunOperation], now: float) -> float | None:
    """Tokens for each second of computing; None where no operation ended lately."""
    spans = [
        (each.tokens, each.ended - each.started)
        for each in operations
        if each.started is not None and each.ended is not None
        if now - each.ended < _ACTIVE_SECONDS
    ]
    seconds = sum(seconds for _, seconds in spans)
    return sum(tokens for tokens, _ in spans) / seconds if seconds > 0 else None


async def _now(api: Api, run: TrainingRun, metric: str, points: int, after: int) -> RunNow:
    ids = {"run_id": run.training_run_id}
    curves = {"keys": metric, "points": points, "after": after}
    done = {"status": "done", "limit": _OPERATIONS}
    try:
        metrics, ended, queue = await asyncio.gather(
            api.call(endpoints.GET_RUN_METRICS.at(**ids), None, query=curves),
            api.call(endpoints.LIST_RUN_OPERATIONS.at(**ids), None, query=done),
            api.call(endpoints.GET_RUN_QUEUE.at(**ids), None),
        )
    except NotFoundError as error:
        raise CommandError(
            f"{api.config.base_url} has no curves of its runs",
            "A Tinsmith server of this release keeps them; other services do not.",
        ) from error
    rate = speed(ended.operations, time.time())
    return RunNow(run, metrics.keys, metrics.series.get(metric), rate, queue)
