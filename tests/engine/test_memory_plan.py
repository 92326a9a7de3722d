"""Memory is divided by a plan: by settings and models, and not by what was done first."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.sample.test_sampler_memory import tensor_bytes
from tinsmith.engine.base import Failure, Pass, SampleJob, Step
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.memory_plan import plan_memory
from tinsmith.errors import EngineError, ValidationError
from tinsmith.memory import machine_bytes
from tinsmith.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

CPU = torch.device("cpu")
GIB = 2**30
ITERATIONS = int(os.environ.get("TINSMITH_RL_ITERATIONS", "40"))
"""`make memory` takes ten thousand."""


def config_of(**settings: object) -> LocalEngineConfig:
    return LocalEngineConfig(device="cpu", **settings)  # type: ignore[arg-type]  # any setting


def test_the_parts_add_up_to_a_fraction_of_the_machines_memory() -> None:
    weights = machine_bytes() // 100
    plan = plan_memory(config_of(memory_fraction=0.5, kv_cache_bytes=weights), CPU, [weights] * 2)
    assert plan.total_bytes == int(0.5 * machine_bytes())
    assert (plan.weights_bytes, plan.cache_bytes, plan.num_caches) == (2 * weights, weights, 2)
    parts = 4 * weights + plan.adapter_bytes + plan.pass_bytes
    assert parts == plan.total_bytes
    assert str(plan).count("GiB") == 5, "it is printed at the start"


def test_models_that_do_not_fit_together_leave_room_for_work() -> None:
    total = int(0.9 * machine_bytes())
    plan = plan_memory(config_of(), CPU, [total // 2] * 10)
    assert plan.weights_bytes == int(0.6 * total)
    plan = plan_memory(config_of(memory_budget_bytes=GIB), CPU, [total // 2] * 10)
    assert plan.weights_bytes == GIB


def test_each_name_of_a_model_has_its_part_of_the_share_for_keys_and_values() -> None:
    one = plan_memory(config_of(memory_fraction=0.001), CPU, [0])
    three = plan_memory(config_of(memory_fraction=0.001), CPU, [0], num_names=3)
    assert three.num_caches * three.cache_bytes <= one.cache_bytes == one.total_bytes // 3


def test_an_adapter_for_which_there_is_no_memory_is_refused_with_the_numbers() -> None:
    plan = plan_memory(config_of(), CPU, [GIB])
    room = plan.adapter_bytes + plan.pass_bytes
    plan.check_adapter(room - 10, held_bytes=10)
    with pytest.raises(EngineError, match=rf"takes {room:,} bytes.* {room - 10:,} bytes are left"):
        plan.check_adapter(room, held_bytes=10)


def test_a_fraction_above_one_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"engine\.memory_fraction"):
        config_of(memory_fraction=1.1)


NewCore = Callable[..., EngineCore]


@pytest.fixture
def new_core(model_folder: Callable[[str], Path]) -> NewCore:
    """A core with so much memory in all, and in it an adapter called "model"."""

    def new(
        total_bytes: int | None = None, *, rank: int = 8, kv_cache_bytes: int = 2**20
    ) -> EngineCore:
        settings: dict[str, object] = {"models": {"tiny": str(model_folder("llama"))}}
        if total_bytes is not None:
            settings["memory_fraction"] = total_bytes / machine_bytes()
        core = EngineCore(config_of(kv_cache_bytes=kv_cache_bytes, **settings))
        assert core.create_adapter("model", "tiny", LoraConfig(rank=rank, seed=1)) is None
        return core

    return new


@pytest.fixture
def core(new_core: NewCore) -> EngineCore:
    return new_core()


def test_a_model_that_does_not_fit_is_refused_and_those_there_go_on(
    model_folder: Callable[[str], Path],
) -> None:
    models = {"tiny": str(model_folder("llama"))}
    config = config_of(models=models, kv_cache_bytes=2**10, memory_fraction=1e-9)
    failure = EngineCore(config).create_adapter("model", "tiny", LoraConfig(rank=8))
    assert isinstance(failure, Failure)
    assert "are left for it" in failure.message


def test_a_sampler_for_which_there_is_no_memory_is_refused_until_another_goes(
    new_core: NewCore,
) -> None:
    core = new_core(16 * 2**20, rank=32)
    frozen = (core.freeze("model", f"weights {number}") for number in range(1000))
    refused = next(failure for failure in frozen if failure is not None)
    assert "bytes are left for it" in refused.message
    health = core.health()
    assert health.num_samplers > 1
    assert health.sampler_bytes > health.adapter_limit_bytes
    core.unload_sampler("weights 0")
    assert core.freeze("model", "another") is None


def test_copies_of_adapters_that_are_sampled_side_by_side_are_in_the_plan(
    new_core: NewCore,
) -> None:
    """They count while they are there, and leave when another adapter needs their room."""
    core = new_core(16 * 2**20)
    frozen = [f"weights {number}" for number in range(4)]
    for weights_id in frozen:
        assert core.freeze("model", weights_id) is None
    before = core.health()
    sample_together(core, frozen)
    during = core.health()
    assert during.sampler_bytes == 2 * before.sampler_bytes, "as much as the samplers themselves"
    assert during.adapter_bytes == before.adapter_bytes + before.sampler_bytes
    of_each, held = before.sampler_bytes // 4, tensor_bytes()
    core.unload_sampler(frozen[0])
    assert held - tensor_bytes() == pytest.approx(before.sampler_bytes + of_each, rel=0.1)
    assert core.health().sampler_bytes == before.sampler_bytes * 3 // 4
    sample_together(core, frozen[1:])
    assert core.health().sampler_bytes == before.sampler_bytes * 6 // 4
    limit = before.adapter_limit_bytes
    for number in range((limit - core.health().adapter_bytes) // of_each + 1):
        assert core.freeze("model", f"weights {4 + number}") is None
    health = core.health()
    assert health.sampler_bytes == of_each * health.num_samplers, "the copies are gone"
    assert health.adapter_bytes <= limit


def test_memory_for_the_next_gradient_is_kept_only_where_there_is_room(new_core: NewCore) -> None:
    vectors = {}
    for share in (2**28, 2**21):
        core = new_core(share, rank=32, kv_cache_bytes=2**10)
        weights = core.health().adapter_bytes
        train(core)
        vectors[share] = core.health().adapter_bytes // weights
    assert vectors == {2**28: 4, 2**21: 3}, "weights and moments, and in the first a gradient"


def test_each_base_model_has_its_part_of_the_room_for_copies() -> None:
    one = plan_memory(config_of(memory_fraction=0.1), CPU, [0])
    three = plan_memory(config_of(memory_fraction=0.1, kv_cache_bytes=1), CPU, [0] * 3)
    assert one.stack_bytes == one.adapter_bytes // 4
    assert 3 * three.stack_bytes <= three.adapter_bytes // 4


def test_health_tells_what_each_part_holds_and_may_hold(core: EngineCore) -> None:
    train(core)
    sample(core, "job", None)
    health = core.health()
    assert 0 < health.adapter_bytes < health.adapter_limit_bytes
    assert health.cache_limit_bytes == 2**20
    assert 0 < health.cache_bytes < health.cache_limit_bytes, "the prompt is remembered"
    assert health.weights_bytes > 0


def sample_together(core: EngineCore, weights_ids: list[str]) -> None:
    for weights_id in weights_ids:
        job = SampleJob(
            job_id=f"job of {weights_id}",
            base_model="tiny",
            weights_id=weights_id,
            prompt=ModelInput.from_ints([10, 40, 20]),
            params=SamplingParams(max_tokens=8, seed=1, stop=[]),
        )
        assert core.submit_sample(job) is None
    finish_samples(core)


def finish_samples(core: EngineCore) -> None:
    while core.is_sampling:
        for _, event in core.sampling_turn():
            assert isinstance(event, SampleResponse), event


def train(core: EngineCore) -> None:
    tokens = [10, 40, 20, 60]
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [1.0] * 3,
        },
    )
    for finished in core.run_passes(
        [Pass(adapter_id="model", data=[datum], loss_fn="cross_entropy")]
    ):
        assert finished is None or not isinstance(finished.result, Failure), finished
    (metrics,) = core.step([Step(adapter_id="model", params=AdamParams(learning_rate=1e-4))])
    assert not isinstance(metrics, Failure), metrics


def sample(core: EngineCore, job_id: str, weights_id: str | None) -> None:
    job = SampleJob(
        job_id=job_id,
        base_model="tiny",
        weights_id=weights_id,
        prompt=ModelInput.from_ints(list(range(5, 40))),
        params=SamplingParams(max_tokens=4, seed=1, stop=[]),
        num_samples=2,
    )
    assert core.submit_sample(job) is None
    finish_samples(core)


def test_a_loop_of_reinforcement_learning_leaves_memory_flat(core: EngineCore) -> None:
    """Pass, step, freeze, sample, and the sampler before the last goes."""

    def iterate(numbers: range) -> None:
        for number in numbers:
            train(core)
            assert core.freeze("model", f"weights {number}") is None
            sample(core, f"job {number}", f"weights {number}")
            core.unload_sampler(f"weights {number - 2}")

    iterate(range(10))
    before, cache_before = tensor_bytes(), core.health().cache_bytes
    iterate(range(10, 10 + ITERATIONS))
    gc.collect()
    assert tensor_bytes() <= before
    assert core.health().cache_bytes == cache_before
