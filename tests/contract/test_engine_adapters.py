"""What every engine promises of base models and adapters, and of its own end; run on each.

Numbers are compared with each other, never with constants, so a model may be anything that learns.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.engine_calls import (
    ADAM,
    BASE_MODEL,
    CONTEXT_LENGTH,
    LORA,
    SENTENCE,
    VOCAB_SIZE,
    create,
    datum,
    drain,
    failed_sample,
    forward_backward,
    job,
    logprobs,
    new_name,
    run,
    running,
    sample,
    train,
)
from tinsmith.engine.base import Engine, Failure, Step
from tinsmith.errors import EngineDiedError
from tinsmith.types import (
    LoraConfig,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


# Base models


async def test_capabilities_describe_the_base_models(engine: Engine) -> None:
    capabilities = await engine.capabilities()
    (model,) = capabilities.models
    assert (model.name, model.vocab_size) == (BASE_MODEL, VOCAB_SIZE)
    assert model.max_context_length == CONTEXT_LENGTH
    assert capabilities.max_lora_rank >= 32


async def test_health_counts_what_the_engine_holds(engine: Engine) -> None:
    before = await engine.health()
    name, sampler = await create(engine), new_name()
    assert await engine.freeze(name, sampler) is None
    health = await engine.health()
    assert health.alive
    assert health.memory_bytes > 0
    assert health.num_adapters == before.num_adapters + 1
    assert health.num_samplers == before.num_samplers + 1
    await engine.unload_adapter(name)
    await engine.unload_sampler(sampler)
    after = await engine.health()
    assert after.num_adapters == before.num_adapters
    assert after.num_samplers == before.num_samplers


async def test_an_unknown_base_model_is_refused_by_name_and_the_known_ones_are_listed(
    engine: Engine,
) -> None:
    for failure in (
        await engine.create_adapter(new_name(), "gpt-17", LORA),
        await engine.load_sampler(new_name(), "gpt-17", Path("/nowhere")),
        await failed_sample(engine, job(base_model="gpt-17")),
    ):
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert "gpt-17" in failure.message
        assert BASE_MODEL in failure.message


# Adapters


async def test_a_new_adapter_equals_the_base_model(engine: Engine, adapter: str) -> None:
    response = await sample(engine, job(SENTENCE, prompt_logprobs=True, max_tokens=1))
    assert response.prompt_logprobs_np is not None
    np.testing.assert_allclose(
        await logprobs(engine, adapter), response.prompt_logprobs_np[1:], atol=1e-5
    )


async def test_an_adapter_cannot_be_made_twice(engine: Engine, adapter: str) -> None:
    await train(engine, adapter)
    before = await logprobs(engine, adapter)
    failure = await engine.create_adapter(adapter, BASE_MODEL, LORA)
    assert isinstance(failure, Failure)
    assert adapter in failure.message
    np.testing.assert_array_equal(await logprobs(engine, adapter), before)


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        (LoraConfig(rank=0), "rank"),
        (LoraConfig(rank=100_000), "rank"),
        (LoraConfig(rank=4, seed=-1), "seed"),
        (LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False), "train_"),
    ],
)
async def test_impossible_adapters_are_refused(engine: Engine, lora: LoraConfig, word: str) -> None:
    failure = await engine.create_adapter(new_name(), BASE_MODEL, lora)
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert word in failure.message


async def test_an_unloaded_adapter_is_gone_and_its_name_is_free(engine: Engine) -> None:
    name = await create(engine)
    await train(engine, name)
    await engine.unload_adapter(name)
    await engine.unload_adapter(name)
    (result,) = await run(engine, forward_backward(name, datum()))
    assert isinstance(result, Failure)
    assert name in result.message
    fresh = await create(engine)
    assert await engine.create_adapter(name, BASE_MODEL, LORA) is None
    np.testing.assert_array_equal(await logprobs(engine, name), await logprobs(engine, fresh))


async def test_unknown_adapters_fail_as_the_users_mistake(engine: Engine, tmp_path: Path) -> None:
    (passed,) = await run(engine, forward_backward("nobody", datum()))
    (stepped,) = await engine.step([Step(adapter_id="nobody", params=ADAM)])
    for failure in (
        passed,
        stepped,
        await engine.save("nobody", tmp_path / "a", "training"),
        await engine.restore("nobody", tmp_path / "a", "training"),
        await engine.freeze("nobody", new_name()),
    ):
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert "nobody" in failure.message


# The end


async def test_a_closed_engine_says_so(kind: str, model_folder: Path) -> None:
    async with running(kind, model_folder) as engine:
        assert await engine.create_adapter("a", BASE_MODEL, LORA) is None
        stream = engine.sample(job(max_tokens=100, num_samples=50, stream=True))
        await anext(stream)
        await engine.close()
        await engine.close()
        health = await engine.health()
        assert not health.alive
        assert "closed" in health.detail
        with pytest.raises(EngineDiedError, match="closed"):
            await drain(stream)
        with pytest.raises(EngineDiedError, match="closed"):
            await engine.create_adapter("b", BASE_MODEL, LORA)
        with pytest.raises(EngineDiedError, match="closed"):
            await run(engine, forward_backward("a", datum()))
