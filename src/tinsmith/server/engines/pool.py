"""The pool: the slots of a server, what they are together, and who goes where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from tinsmith.engine.base import BaseModelInfo, Capabilities, Engine, Health, SampleJob
from tinsmith.server.engines.placement import (
    SamplingPlace,
    TrainingPlace,
    sampling_slot,
    training_slot,
)
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.slot import EngineFactory, Slot
from tinsmith.server.operations.live_model import LiveModel
from tinsmith.server.sampling.loaded import LoadedSamplers
from tinsmith.server.tuning import TUNING
from tinsmith.types import EncodedTextChunk, ModelInput

_ACTIVE_SECONDS = 60.0
"""A model that was used so lately counts as one that has something to do."""

_PREFIX_TOKENS = 64
"""Prompts that begin with the same tokens, this many, are sampled in one slot."""


class EnginePool:
    def __init__(
        self,
        plans: Sequence[SlotPlan],
        factory: EngineFactory,
        clean_up: Callable[[], Awaitable[None]],
        new_samplers: Callable[[], LoadedSamplers],
        health_seconds: float = TUNING.health_seconds,
    ) -> None:
        self.slots = tuple(
            Slot(plan, factory, clean_up, new_samplers(), health_seconds) for plan in plans
        )
        self.training = tuple(slot for slot in self.slots if slot.plan.trains)
        self.sampling = tuple(slot for slot in self.slots if slot.plan.samples)
        self.capabilities: Capabilities | None = None
        """What any of them can do; None before the first is up."""
        self.on_start(self._learn)

    # Choosing

    def training_slot(self, model: LiveModel) -> Slot:
        """The slot for a model that is in none, or has to leave its own."""
        since = time.time() - _ACTIVE_SECONDS
        base = model.record.base_model
        places = [
            TrainingPlace(
                slot,
                slot.number,
                is_up=slot.is_expected,
                num_active=sum(_is_active(each, since) for each in slot.models),
                num_models=len(slot.models),
                has_base=base in slot.bases,
            )
            for slot in _open(self.training)
        ]
        return training_slot(places)

    def sampling_slot(self, job: SampleJob) -> Slot:
        places = [
            SamplingPlace(
                slot,
                slot.number,
                is_up=slot.is_up,
                num_jobs=slot.num_jobs,
                has_weights=_has_weights(slot, job),
            )
            for slot in _open(self.sampling)
        ]
        return sampling_slot(places, _prefix(job))

    # What they are together

    def on_start(self, callback: Callable[[], None]) -> None:
        """`callback` is called each time an engine is up."""
        for slot in self.slots:
            slot.on_start(callback)

    async def start(self) -> None:
        for slot in self.slots:
            await slot.start()

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self.slots))

    async def first(self) -> Engine:
        """An engine that is up; waits while there is none."""
        waiting = [asyncio.create_task(slot.get()) for slot in self.slots]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()[0]
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    @property
    def is_up(self) -> bool:
        """Whether there is an engine that trains and one that samples."""
        return all(any(slot.is_up for slot in slots) for slots in (self.training, self.sampling))

    @property
    def has_been_up(self) -> bool:
        return any(slot.generation for slot in self.slots)

    @property
    def trouble(self) -> str:
        """Why there are none, according to the first slot that is not up."""
        return next((slot.trouble for slot in self.slots if not slot.is_up), "")

    def _learn(self) -> None:
        known = [slot.capabilities for slot in self.slots if slot.capabilities is not None]
        models: dict[str, BaseModelInfo] = {}
        for each in known:
            models = {m.name: m for m in each.models} | models
        refused = {m.name: m for each in known for m in each.refused if m.name not in models}
        self.capabilities = Capabilities(
            models=tuple(models.values()),
            max_lora_rank=min(each.max_lora_rank for each in known),
            refused=tuple(refused.values()),
            device="; ".join(dict.fromkeys(each.device for each in known)),
        )

    @property
    def health(self) -> Health:
        """The sum of what was last heard of each."""
        heard = [slot.health for slot in self.slots]
        return Health(
            alive=any(each.alive for each in heard),
            num_adapters=sum(each.num_adapters for each in heard),
            num_samplers=sum(each.num_samplers for each in heard),
            running_samples=sum(each.running_samples for each in heard),
            waiting_samples=sum(each.waiting_samples for each in heard),
            memory_bytes=sum(each.memory_bytes for each in heard),
            weights_bytes=sum(each.weights_bytes for each in heard),
            cache_bytes=sum(each.cache_bytes for each in heard),
            cache_limit_bytes=sum(each.cache_limit_bytes for each in heard),
            adapter_bytes=sum(each.adapter_bytes for each in heard),
            sampler_bytes=sum(each.sampler_bytes for each in heard),
            adapter_limit_bytes=sum(each.adapter_limit_bytes for each in heard),
            decoded_tokens=sum(each.decoded_tokens for each in heard),
            busy_seconds=sum(each.busy_seconds for each in heard),
        )

    @property
    def num_restarts(self) -> int:
        return sum(slot.num_restarts for slot in self.slots)


def _open(slots: Sequence[Slot]) -> Sequence[Slot]:
    return [slot for slot in slots if slot.is_open] or slots


def _is_active(model: LiveModel, since: float) -> bool:
    return model.is_busy or model.last_used_at >= since or len(model.queue) > 0


def _has_weights(slot: Slot, job: SampleJob) -> bool:
    if job.weights_id is None:
        return job.base_model in slot.bases
    return slot.samplers.has(job.weights_id)


def _prefix(job: SampleJob) -> bytes:
    """What jobs have in common that find each other's keys and values in a cache."""
    names = f"{job.scope} {job.base_model} {job.weights_id} ".encode()
    return names + _first_tokens(job.prompt)


def _first_tokens(prompt: ModelInput) -> bytes:
    first = prompt.chunks[0] if prompt.chunks else None
    if not isinstance(first, EncodedTextChunk):
        return b""
    return bytes(first.tokens_np[:_PREFIX_TOKENS].tobytes())
