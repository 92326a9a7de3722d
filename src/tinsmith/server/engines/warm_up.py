"""What an engine does before its server is ready, so that the first programs need not wait for it.

Base models are loaded; samples and passes of a few sizes run once, with and without an adapter, so
that kernels are compiled and graphs captured. It goes through the interface, as requests do. An
engine that takes the place of a dead one is not kept from its work by it. What fails here is
logged, and left to the first request that needs it.
"""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from tinsmith.engine.base import (
    BaseModelInfo,
    Capabilities,
    Engine,
    Failure,
    Pass,
    SampleJob,
    Step,
)
from tinsmith.errors import EngineDiedError, EngineError
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.slot import EngineFactory
from tinsmith.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

PROGRESS = logging.getLogger("tinsmith.progress")
"""What `tinsmith serve` shows at every log level; engines tell there of loading and converting."""

_NAME = "warm-up"
"""Name of the adapter and the frozen weights that exist while it runs."""

_RANK = 32
"""The rank that adapters have unless they ask for another."""

_ROWS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 4, 2, 1)
"""How many samples run at a time, from step to step: graphs are captured for sizes in between."""

_FEW_ROWS = (4, 2, 1)
"""The same where there are no graphs."""

_PROMPT_TOKENS = 8
_SAMPLE_TOKENS = 16
"""Tokens of the shortest sample: by then the last of the burst has arrived."""

_BATCHES = ((1, 64), (1, 64), (2, 256), (2, 256), (4, 1024), (8, 1024))
_SMALL_BATCHES = ((1, 32),)
"""Sequences, and tokens of each. What is small comes twice: then it is captured."""


def warmed(factory: EngineFactory, is_wanted: bool | None) -> EngineFactory:
    """Engines that are warm when they are started for the first time; None means on CUDA only."""
    begun: set[int] = set()

    async def start(plan: SlotPlan) -> Engine:
        engine = await factory(plan)
        if plan.number in begun:
            return engine
        begun.add(plan.number)
        try:
            capabilities = await engine.capabilities()
            if _is_accelerated(capabilities) if is_wanted is None else is_wanted:
                await warm_up(engine, capabilities, plan)
        except BaseException:
            # Nobody else knows of it yet.
            await engine.close()
            raise
        return engine

    return start


async def warm_up(engine: Engine, capabilities: Capabilities, plan: SlotPlan) -> None:
    """Do a little of everything that the slot is for, with every model."""
    started = time.monotonic()
    for base in capabilities.models:
        PROGRESS.info("warming up %s", base.name)
        try:
            await _warm_up_model(_Warmer(engine, base, _is_accelerated(capabilities)), plan)
        except EngineDiedError:
            raise
        except EngineError as error:
            PROGRESS.warning("%s is not warm, its first requests take longer: %s", base.name, error)
    PROGRESS.info("warm after %.1f s", time.monotonic() - started)


def _is_accelerated(capabilities: Capabilities) -> bool:
    """On the CPU nothing is compiled."""
    return capabilities.device.startswith("cuda")


async def _warm_up_model(warmer: _Warmer, plan: SlotPlan) -> None:
    # Samples first: some engines divide the memory that is free when the first one comes.
    if plan.samples and warmer.base.is_sampleable:
        await warmer.sample(weights_id=None)
    if warmer.base.is_trainable:
        await warmer.with_adapter(trains=plan.trains, samples=plan.samples)


class _Warmer:
    """One model's warm-up."""

    def __init__(self, engine: Engine, base: BaseModelInfo, is_accelerated: bool) -> None:
        self.base = base
        self._engine = engine
        self._rows = _ROWS if is_accelerated else _FEW_ROWS
        self._batches = _BATCHES if is_accelerated else _SMALL_BATCHES
        self._random = np.random.default_rng(0)

    async def with_adapter(self, *, trains: bool, samples: bool) -> None:
        engine = self._engine
        lora = LoraConfig(rank=_RANK, seed=0)
        _check(await engine.create_adapter(_NAME, self.base.name, lora))
        try:
            if trains:
                await self._train()
            if samples and self.base.is_sampleable:
                _check(await engine.freeze(_NAME, _NAME))
                await self.sample(weights_id=_NAME)
        finally:
            await engine.unload_sampler(_NAME)
            await engine.unload_adapter(_NAME)

    async def _train(self) -> None:
        for sequences, length in self._batches:
            length = min(length, self.base.max_context_length)
            PROGRESS.info("warming up %s: a pass of %dx%d", self.base.name, sequences, length)
            data = [self._datum(length) for _ in range(sequences)]
            one = Pass(adapter_id=_NAME, data=data, loss_fn="cross_entropy")
            async for finished in self._engine.run_passes([one]):
                _check(finished.result)
            step = Step(adapter_id=_NAME, params=AdamParams(learning_rate=1e-6))
            for result in await self._engine.step([step]):
                _check(result)

    async def sample(self, weights_id: str | None) -> None:
        """A burst whose samples end one after another, so that steps of every size run."""
        what = "without an adapter" if weights_id is None else "with an adapter"
        PROGRESS.info("warming up %s: %d samples %s", self.base.name, self._rows[0], what)
        lengths = [
            _SAMPLE_TOKENS + sum(number < rows for rows in self._rows)
            for number in range(self._rows[0])
        ]
        await asyncio.gather(
            *(self._run(weights_id, number, length) for number, length in enumerate(lengths))
        )

    async def _run(self, weights_id: str | None, number: int, num_tokens: int) -> None:
        job = SampleJob(
            job_id=f"{_NAME}-{number}",
            base_model=self.base.name,
            weights_id=weights_id,
            prompt=ModelInput.from_ints(self._tokens(_PROMPT_TOKENS)),
            params=SamplingParams(max_tokens=num_tokens, stop=[], seed=number),
            scope=_NAME,
        )
        async for event in self._engine.sample(job):
            _check(event)

    def _datum(self, length: int) -> Datum:
        tokens = self._tokens(length)
        inputs = {"target_tokens": tokens, "weights": [1.0] * length}
        return Datum(ModelInput.from_ints(tokens), inputs)

    def _tokens(self, length: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, self.base.vocab_size, length).tolist()
        return tokens


def _check(result: object) -> None:
    if isinstance(result, Failure):
        raise EngineError(result.message)
