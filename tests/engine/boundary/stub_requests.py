"""Requests to a worker around the stub core, and what it replies."""

from __future__ import annotations

import queue
from typing import Any

from tests.engine.boundary.stub_core import StubCore
from tinsmith.engine.base import Pass, SampleJob
from tinsmith.engine.local.boundary.messages import (
    Abandon,
    Item,
    Reply,
    Request,
)
from tinsmith.engine.local.boundary.worker import Incoming, Worker
from tinsmith.types import (
    LoraConfig,
    ModelInput,
    SamplingParams,
)

LORA = LoraConfig(rank=4)


def job(
    job_id: str,
    max_tokens: int = 1,
    weights_id: str | None = None,
    base_model: str = "base",
    **more: Any,
) -> SampleJob:
    return SampleJob(
        job_id=job_id,
        base_model=base_model,
        weights_id=weights_id,
        prompt=ModelInput.from_ints([1]),
        params=SamplingParams(max_tokens=max_tokens),
        **more,
    )


def passes(*adapter_ids: str) -> tuple[Pass, ...]:
    return tuple(Pass(adapter_id=name, data=[], loss_fn="cross_entropy") for name in adapter_ids)


def work(*messages: Request | Abandon, core: StubCore | None = None) -> list[Reply]:
    """Let a worker treat messages that all have arrived; end when the last reply is there."""
    core = core or StubCore()
    inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    abandoned = {m.number for m in messages if isinstance(m, Abandon)}
    waiting = {m.number for m in messages} - abandoned
    replies: list[Reply] = []

    def send(batch: list[Reply]) -> None:
        replies.extend(batch)
        waiting.difference_update(r.number for r in batch if not isinstance(r, Item))
        if not waiting:
            inbox.put(None)

    for message in messages:
        inbox.put(message)
    Worker(core, inbox, send, core.clock).run()
    return replies
