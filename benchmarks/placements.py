"""A pool with many slots and models, none of which computes, to choose slots in."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from tinsmith.engine.base import Engine, SampleJob
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.operations.queue import SequenceQueue
from tinsmith.server.sampling.loaded import LoadedSamplers
from tinsmith.server.store.records import ModelRecord
from tinsmith.types import ModelInput, SamplingParams

_MODEL = ModelRecord(
    model_id="",
    owner="owner",
    session_id=None,
    model_seq_id=0,
    base_model="tiny",
    lora={},
    optimizer={},
    created_at=0.0,
    last_request_at=0.0,
)


def decision_seconds(num_slots: int, num_models: int, count: int) -> list[float]:
    """How long each of `count` choices took, half for training and half for sampling."""
    pool, draw = filled_pool(num_slots, num_models), random.Random(7)
    taken = []
    for number in range(count):
        prompt = ModelInput.from_ints([draw.randrange(1000) for _ in range(500)])
        job = SampleJob(
            job_id="j", base_model="tiny", weights_id=None, prompt=prompt, params=SamplingParams()
        )
        model = new_model(number)
        started = time.perf_counter()
        if number % 2:
            pool.training_slot(model)
        else:
            pool.sampling_slot(job)
        taken.append(time.perf_counter() - started)
    return taken


def filled_pool(num_slots: int, num_models: int) -> EnginePool:
    pool = EnginePool(
        [SlotPlan(number=number) for number in range(num_slots)],
        _no_engine,
        _nothing,
        lambda: LoadedSamplers(lambda name: nullcontext(Path(name)), 64),
    )
    for number in range(num_models):
        model = new_model(number)
        slot = pool.training_slot(model)
        slot.models[model] = None
    return pool


def new_model(number: int) -> LiveModel:
    return LiveModel(record=replace(_MODEL, model_id=f"m{number}"), queue=SequenceQueue(1))


async def _no_engine(plan: SlotPlan) -> Engine:
    raise NotImplementedError


async def _nothing() -> None: ...
