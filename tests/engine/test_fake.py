"""What is the fake engine's own: pretended work, pretended death, and no torch.

What every engine promises is in `tests/contract/test_engine_*.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from tinsmith.engine.base import Failure, Pass, SampleJob, Step
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig, FakeModel
from tinsmith.engine.fake.losses import LOSSES
from tinsmith.engine.fake.model import Bigram, BigramAdapter
from tinsmith.engine.loss_table import LOSSES as LOSS_TABLE
from tinsmith.errors import EngineDiedError
from tinsmith.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

LORA = LoraConfig(rank=4)
MODEL = FakeModel().name


def passes(adapter_id: str, loss_fn: str = "cross_entropy") -> list[Pass]:
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    return [Pass(adapter_id=adapter_id, data=[datum], loss_fn=loss_fn)]


def job(job_id: str = "j", **params: Any) -> SampleJob:
    return SampleJob(
        job_id=job_id,
        base_model=MODEL,
        weights_id=None,
        prompt=ModelInput.from_ints([1, 2]),
        params=SamplingParams(**{"max_tokens": 10, "stop": [], **params}),
    )


def test_importing_it_does_not_import_torch() -> None:
    script = "import sys, tinsmith.engine.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


async def test_pretended_work_is_done_one_after_another() -> None:
    engine = FakeEngine(FakeEngineConfig(pass_seconds=0.05))
    await engine.create_adapter("a", MODEL, LORA)
    start = time.monotonic()

    async def run() -> None:
        async for _ in engine.run_passes([*passes("a"), *passes("a")]):
            pass

    await asyncio.gather(run(), engine.step([Step(adapter_id="a", params=AdamParams())]))
    assert 0.14 < time.monotonic() - start < 5.0


async def test_pretended_decoding_can_be_cancelled_at_once() -> None:
    engine = FakeEngine(FakeEngineConfig(token_seconds=3600))
    stream = engine.sample(job())
    ending = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    await engine.cancel("j")
    async with asyncio.timeout(20):
        assert isinstance(await ending, Failure)


async def test_a_pretended_death_loses_everything_and_fails_whoever_waits() -> None:
    engine = FakeEngine(FakeEngineConfig(token_seconds=3600, pass_seconds=0.05))
    await engine.create_adapter("a", MODEL, LORA)
    sampling = asyncio.ensure_future(anext(engine.sample(job())))
    stepping = asyncio.ensure_future(engine.step([Step(adapter_id="a", params=AdamParams())]))
    await asyncio.sleep(0.01)
    engine.die("killed by SIGKILL")
    for pending in (sampling, stepping):
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            await pending
    health = await engine.health()
    assert (health.alive, health.num_adapters) == (False, 0)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        await engine.create_adapter("a", MODEL, LORA)


async def test_uploaded_losses_are_refused_by_name() -> None:
    engine = FakeEngine()
    await engine.create_adapter("a", MODEL, LORA)
    (finished,) = [item async for item in engine.run_passes(passes("a", "custom"))]
    assert isinstance(finished.result, Failure)
    assert "does not run uploaded losses" in finished.result.message


async def test_several_models_of_any_size_are_served() -> None:
    models = (FakeModel(name="small", vocab_size=7), FakeModel(name="large", vocab_size=50_000))
    engine = FakeEngine(FakeEngineConfig(models=models))
    assert [m.name for m in (await engine.capabilities()).models] == ["small", "large"]
    for model in models:
        asked = SampleJob(
            job_id="j",
            base_model=model.name,
            weights_id=None,
            prompt=ModelInput.from_ints([1]),
            params=SamplingParams(max_tokens=200, stop=[]),
        )
        (response,) = [event async for event in engine.sample(asked)]
        assert isinstance(response, SampleResponse)
        assert max(response.sequences[0].tokens) < model.vocab_size


def test_it_has_every_built_in_loss() -> None:
    assert LOSSES.keys() == LOSS_TABLE.keys()


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_probabilities_sum_to_one_whatever_the_vocabulary(vocab_size: int) -> None:
    model = Bigram("m", vocab_size)
    adapter = BigramAdapter(model, LORA)
    adapter.weights = np.random.default_rng(0).standard_normal(adapter.weights.shape)
    row = model.row(adapter.logprobs(), 3)
    assert row.shape == (vocab_size,)
    assert np.exp(row).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_step_before_any_gradient_is_a_step_with_a_gradient_of_zeros(weight_decay: float) -> None:
    params = AdamParams(learning_rate=0.01, weight_decay=weight_decay)
    random = np.random.default_rng(2)
    without, zeros = (BigramAdapter(Bigram("m", 11), LORA) for _ in range(2))
    start, gradient = random.standard_normal((2, *without.weights.shape))
    zeros.accumulate(np.zeros_like(start))
    for adapter in (without, zeros):
        adapter.weights = start.copy()
    assert without.take_step(params) == zeros.take_step(params)
    for adapter in (without, zeros):
        adapter.accumulate(gradient)
    assert without.take_step(params) == zeros.take_step(params)
    assert np.array_equal(without.weights, zeros.weights)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradients_are_the_slopes_of_the_loss(loss_fn: str) -> None:
    """Against a difference quotient in float64; cispo and gspo hold parts of theirs constant."""
    random = np.random.default_rng(1)
    adapter = BigramAdapter(Bigram("m", 11), LORA)
    adapter.weights = 0.01 * random.standard_normal(adapter.weights.shape)
    previous, targets = random.integers(0, 11, 6), random.integers(0, 11, 6)
    spec = LOSS_TABLE[loss_fn]
    values = {
        "logprobs": random.uniform(-3, -2, 6),
        "advantages": random.standard_normal(6),
        "weights": random.standard_normal(6),
        "sequence_ratio_mask": np.ones(6),
    }
    names = [*spec.required, *(n for n in spec.optional if n in values)]
    inputs = {**spec.config, **{name: values[name] for name in names}}
    cells = adapter.model.cells(previous, targets)

    def loss() -> float:
        return LOSSES[loss_fn](adapter.logprobs().ravel()[cells], **inputs)[0]

    table = adapter.logprobs()
    _, slopes = LOSSES[loss_fn](table.ravel()[cells], **inputs)
    gradient = adapter.gradient(table, cells, slopes)
    for cell in np.ndindex(*adapter.weights.shape):
        step = 1e-7
        adapter.weights[cell] += step
        above = loss()
        adapter.weights[cell] -= 2 * step
        below = loss()
        adapter.weights[cell] += step
        assert (above - below) / (2 * step) == pytest.approx(gradient[cell], abs=1e-5, rel=1e-5)
