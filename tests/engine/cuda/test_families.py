"""Families with experts, latent vectors or recurrent layers on CUDA: against the CPU, in bfloat16,
and of our own decoder captured steps against launched ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.families.test_families import FAMILIES
from tests.engine.sample.sampling_reference import (
    answers,
    assert_trainer_agrees,
    job_of,
    tokens_of,
)
from tests.engine.train.training_reference import RAGGED, assert_close, succeed
from tests.support.tiny_families import save_tiny
from tinsmith.engine.local.config import BaseWeights, LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
from tinsmith.engine.local.model.families import FAMILIES as OWN
from tinsmith.engine.local.model.lora import Adapter
from tinsmith.engine.local.sample.generation import Generator
from tinsmith.types import SampleResponse

pytestmark = pytest.mark.gpu

SMALL = LocalEngineConfig(device="cuda", kv_cache_bytes=1 << 28)

NewAdapter = Callable[..., Adapter]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, made)
    return made


def load(folder: Path, device: str, dtype: str = "float32", kind: BaseWeights = "full") -> Decoder:
    config = LocalEngineConfig(
        device=device, dtype=dtype, models={"tiny": str(folder)}, base_weights=kind
    )
    return BaseModels(config).get("tiny")


def test_a_pass_on_cuda_has_the_gradient_of_the_cpu(
    cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    found = []
    for device in ("cpu", "cuda"):
        decoder = load(folder, device)
        adapter = new_adapter(decoder)
        loss = succeed(decoder, RAGGED, adapter).metrics["loss:sum"]
        assert adapter.grad is not None
        found.append((loss, adapter.grad.cpu()))
    (cpu_loss, expected), (loss, gradient) = found
    assert loss == pytest.approx(cpu_loss, rel=1e-4)
    assert_close(gradient, expected, 1e-3)


def test_samples_on_cuda_have_the_logprobs_of_the_trainer(
    cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    decoder = load(folder, "cuda")
    adapter, prompt = new_adapter(decoder), tokens_of(11)
    jobs = [(job_of("j", prompt, num_samples=3, max_tokens=14, seed=5), adapter)]
    for response in answers(Generator(decoder, SMALL), jobs).values():
        assert_trainer_agrees(decoder, prompt, response, adapter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in OWN])
def test_captured_steps_with_experts_give_what_launched_ones_give(
    cuda: torch.device, model_type: str, dtype: str, tmp_path: Path, new_adapter: NewAdapter
) -> None:
    """Under several adapters, and under none: whatever the router chooses, nothing waits for it."""
    save_tiny(model_type, tmp_path)
    decoder = load(tmp_path, "cuda", dtype)
    adapters = {
        "a": new_adapter(decoder, fill_seed=21, rank=8),
        "b": new_adapter(decoder, fill_seed=22, rank=3),
        "c": new_adapter(decoder, fill_seed=23, train_mlp=False),
        "d": None,
    }
    jobs = [
        (job_of(name, tokens_of(7), num_samples=3, max_tokens=14, seed=5), adapter)
        for name, adapter in adapters.items()
    ]
    captured, launched = (
        [
            (name, sequence.tokens, sequence.logprobs)
            for name, response in answers(generator, jobs).items()
            for sequence in response.sequences
        ]
        for generator in (Generator(decoder, SMALL), Generator(decoder, SMALL, use_graphs=False))
    )
    assert sorted(captured) == sorted(launched)


def test_bfloat16_on_cuda_trains_and_samples(
    cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    decoder = load(folder, "cuda", "bfloat16")
    adapter = new_adapter(decoder)
    succeed(decoder, RAGGED, adapter)
    assert adapter.grad is not None and adapter.grad.isfinite().all()
    jobs = [(job_of("j", tokens_of(11), num_samples=3, max_tokens=14, seed=5), adapter)]
    config = LocalEngineConfig(device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 28)
    (response,) = answers(Generator(decoder, config), jobs).values()
    assert isinstance(response, SampleResponse)
    assert all(len(sequence.tokens) > 0 for sequence in response.sequences)


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_a_base_in_few_bits_on_cuda_has_the_gradient_of_the_cpu(
    kind: BaseWeights, cuda: torch.device, folder: Path, new_adapter: NewAdapter
) -> None:
    """Of linear layers and experts; nothing of it is left behind on the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        decoder = load(folder, device, kind=kind)
        adapter = new_adapter(decoder)
        assert decoder.device.type == adapter.flat.device.type == device
        loss = succeed(decoder, RAGGED, adapter).metrics["loss:sum"]
        assert adapter.grad is not None
        found.append((loss, adapter.grad.cpu(), decoder.nbytes))
    (cpu_loss, expected, cpu_bytes), (loss, gradient, num_bytes) = found
    assert loss == pytest.approx(cpu_loss, rel=1e-3)
    assert_close(gradient, expected, 1e-2)
    assert num_bytes <= 1.1 * cpu_bytes
    prompt = tokens_of(11)
    jobs = [(job_of("j", prompt, num_samples=3, max_tokens=14, seed=5), adapter)]
    for response in answers(Generator(decoder, SMALL), jobs).values():
        assert_trainer_agrees(decoder, prompt, response, adapter)
