"""Families that run through `transformers`' modules, on CUDA: against the CPU, and in bfloat16."""

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
from tinsmith.engine.local.config import LocalEngineConfig
from tinsmith.engine.local.model.base_models import BaseModels
from tinsmith.engine.local.model.decoder import Decoder
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


def load(folder: Path, device: str, dtype: str = "float32") -> Decoder:
    config = LocalEngineConfig(device=device, dtype=dtype, models={"tiny": str(folder)})
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
