"""What frozen samplers leave behind in memory: nothing, however often weights are frozen."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.sample.sampling_reference import answer, job_of
from tests.support.tiny_families import save_tiny
from tinsmith.engine.base import SampleJob
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.core import EngineCore
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.engine.local.sample.kvcache import KVCache
from tinsmith.types import LoraConfig, ModelInput, SampleResponse, SamplingParams


def tensor_bytes() -> int:
    """Bytes of every storage that some tensor in this process refers to, each counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor):
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.fixture
def core(model_folder: Callable[[str], Path]) -> EngineCore:
    models = {"tiny": str(model_folder("llama"))}
    core = EngineCore(LocalEngineConfig(models=models, device="cpu"))
    assert core.create_adapter("model", "tiny", LoraConfig(rank=8, seed=1)) is None
    return core


def sample(core: EngineCore, weights_id: str) -> None:
    job = SampleJob(
        job_id=f"job of {weights_id}",
        base_model="tiny",
        weights_id=weights_id,
        prompt=ModelInput.from_ints([10, 40, 20]),
        params=SamplingParams(max_tokens=2, seed=1, stop=[]),
    )
    assert core.submit_sample(job) is None
    while core.is_sampling:
        for _, event in core.sampling_turn():
            assert isinstance(event, SampleResponse), event


def freeze_and_sample(core: EngineCore, numbers: range, keep: int) -> None:
    """The sampling half of a reinforcement learning loop that keeps its last few samplers."""
    for number in numbers:
        assert core.freeze("model", f"sampler {number}") is None
        sample(core, f"sampler {number}")
        core.unload_sampler(f"sampler {number - keep}")


@pytest.mark.parametrize("variant", ["llama", "qwen3_5_text"])
def test_the_pool_of_keys_and_values_is_free_as_soon_as_its_generator_is(
    variant: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is a large part of a device, which the next base model may need at once."""
    if variant == "llama":
        decoder = Decoder.load(model_folder("llama"))
    else:
        save_tiny(variant, tmp_path)
        decoder = BaseModels(config_of(tmp_path)).get("tiny")
    gc.collect()
    gc.disable()
    try:
        before = num_caches()
        generator = Generator(decoder, config_of(tmp_path))
        answer(generator, job_of("a", list(range(3, 40)), num_samples=2))
        assert num_caches() == before + 1
        del generator
        assert num_caches() == before
    finally:
        gc.enable()


def num_caches() -> int:
    return sum(type(each) is KVCache for each in gc.get_objects())


def config_of(folder: Path) -> LocalEngineConfig:
    return LocalEngineConfig(device="cpu", models={"tiny": str(folder)}, kv_cache_bytes=1 << 20)


def test_a_loop_of_hundreds_of_freezes_leaves_memory_flat(core: EngineCore) -> None:
    freeze_and_sample(core, range(20), keep=4)
    before = tensor_bytes()
    freeze_and_sample(core, range(20, 320), keep=4)
    assert tensor_bytes() <= before
    assert core.health().num_samplers == 4


def test_a_sampler_takes_the_bytes_of_its_own_weights_and_gives_all_of_them_back(
    core: EngineCore,
) -> None:
    freeze_and_sample(core, range(1), keep=100)
    before = tensor_bytes()
    assert core.freeze("model", "one more") is None
    weights = tensor_bytes() - before
    core.unload_sampler("one more")
    freeze_and_sample(core, range(1, 41), keep=100)
    taken = tensor_bytes() - before
    assert 40 * weights <= taken <= 44 * weights  # and the keys and values of three tokens each
    for number in range(1, 41):
        core.unload_sampler(f"sampler {number}")
    assert tensor_bytes() <= before + weights
